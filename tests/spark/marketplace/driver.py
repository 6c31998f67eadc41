"""A driver of its own: takes a folder of files into a lake, batch by batch, with all tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def start(log: Path, lake: Path, files_per_batch: int = 1, cores: int = 2) -> subprocess.Popen[str]:
    """A process that says `started`, and `done` when every table is made."""
    arguments = [str(log), str(lake), str(files_per_batch), str(cores)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.marketplace.driver", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def main(log: str, lake: str, files_per_batch: str, cores: str) -> None:
    from tests.spark.marketplace.tables import run_files

    from conquiet.spark import session
    from marketplace.pipeline import Job, Lake

    config = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    spark = session("driver", master=f"local[{cores}]", config=config)
    print("started", flush=True)
    # A refresh after every batch: days are written more than once, and kills meet all of it.
    job = Job(Lake(spark, lake), once=True, refresh_seconds=0)
    run_files(job, Path(log), maxFilesPerTrigger=files_per_batch)
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
