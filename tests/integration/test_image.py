"""The image of the Dockerfile, built by buildah on Debian's packages, without a registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import needs

ROOT = Path(__file__).parents[2]
EXTRAS = "metrics,postgres,redis"
PIP = "[global]\nno-index = true\nfind-links = /wheels\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("image"),
]


class Builder:
    """Runs buildah with a storage of its own, as root in a container can."""

    def __init__(self, folder: Path) -> None:
        self._storage = ["--root", str(folder / "root"), "--runroot", str(folder / "run")]
        self._environ = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(folder)}

    def __call__(self, *arguments: str | Path) -> str:
        command = ["buildah", *self._storage, "--storage-driver", "vfs", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=self._environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    for name in ("buildah", "mmdebstrap"):
        if shutil.which(name) is None:
            needs.missing(name, f"apt-get install {name}")
    if os.getuid() != 0:
        needs.missing("root", "buildah and mmdebstrap run as root here")
    return Builder(tmp_path_factory.mktemp("buildah"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build installs, for the Python of the base: a build has no index to ask."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ["--quiet", "--disable-pip-version-check", "--prefer-binary", "--dest", folder]
    options += ["--constraint", ROOT / "constraints.txt"]
    wanted = [f"{ROOT}[{EXTRAS}]", "hatchling", "pip", "setuptools"]
    wanted.append("async-timeout")  # of redis-py, for Debian's Python 3.11.2
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *wanted], check=True)
    return folder


@pytest.fixture(scope="module")
def container(
    builder: Builder, wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("base")
    packages = "--include=python3,python3-venv"
    root = folder / "base.tar"
    made = ["mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", root]
    subprocess.run(made, check=True, timeout=600)
    base = builder("from", "scratch")
    builder("add", "--quiet", base, root, "/")
    builder("commit", "--quiet", base, "localhost/python")
    (folder / "pip.conf").write_text(PIP)
    mounts = ["--volume", f"{wheels}:/wheels:ro", "--volume", f"{folder}/pip.conf:/etc/pip.conf:ro"]
    arguments = ["--build-arg", "BASE=localhost/python", "--build-arg", f"EXTRAS={EXTRAS}"]
    builder("build", "--pull-never", *arguments, *mounts, "--tag", "localhost/conquiet", ROOT)
    own = builder("from", "--pull-never", "localhost/conquiet")
    yield own
    builder("rm", own)


def test_the_image_is_built_and_runs_as_a_user_without_rights(
    builder: Builder, container: str
) -> None:
    assert builder("run", container, "--", "id", "-u") == "10001"
    assert builder("run", container, "--", "conquiet", "--version").startswith("conquiet ")
    said = builder("inspect", "--format", "{{.OCIv1.Config.Cmd}} {{.OCIv1.Config.User}}", container)
    assert said == "[conquiet relay run] 10001"


def test_the_relay_of_the_image_publishes_an_outbox(builder: Builder, container: str) -> None:
    emit = (
        "from conquiet import Message; from conquiet.sql import Outbox, engine;"
        "e = engine('sqlite:////tmp/o.sqlite');"
        "c = e.begin(); t = c.__enter__();"
        "Outbox('orders', source='/o').add(t, [Message({'id': 'o-1'}, {'type': 'order.placed'})]);"
        "c.__exit__(None, None, None)"
    )
    relay = "conquiet relay run --database sqlite:////tmp/o.sqlite --sink stdout: --health off"
    steps = [
        "conquiet outbox migrate --database sqlite:////tmp/o.sqlite",
        f'python -c "{emit}"',
        f"{relay} --until-empty",
        "conquiet outbox status --database sqlite:////tmp/o.sqlite",
    ]
    said = builder("run", container, "--", "sh", "-ec", "\n".join(steps))
    assert "order.placed" in said
    assert "pending  0" in said
