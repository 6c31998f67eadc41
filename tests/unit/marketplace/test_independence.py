"""The oracle is worth something only while it shares nothing with what it judges."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("room", ["generator", "oracle"])
def test_no_code_of_the_pipeline_and_no_server_is_needed(room):
    names = loaded(f"from marketplace.{room} import *" if room == "oracle" else GENERATOR)
    assert not {"pyspark", "pyarrow", "redis", "sqlalchemy", "pandas"} & names
    assert not {name for name in names if name.startswith(("conquiet.spark", "conquiet.sql"))}
    assert f"marketplace.{room}" in names


def test_the_oracle_and_the_pipeline_share_no_module_of_the_marketplace():
    judge = loaded("import marketplace.oracle, marketplace.generator")
    judged = loaded("import marketplace.lake")
    shared = {name for name in judge & judged if name.startswith("marketplace")}
    assert shared == {"marketplace"}  # which is empty
    assert "marketplace.lake" in judged
    assert "marketplace.oracle.orders" in judge


GENERATOR = """
from marketplace.generator import Generator
next(Generator(orders=1).entries())
"""
