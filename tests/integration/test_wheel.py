"""The wheel holds all that an installed conquiet needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]

MIGRATES = """
import sys
import conquiet
from conquiet.sql import engine, schema

assert conquiet.__file__.startswith(sys.argv[1]), conquiet.__file__
made = engine(sys.argv[2])
schema.migrate(made)
assert schema.verify(made) == []
made.dispose()
"""


SHOWS = """
import asyncio, sys
import httpx
import conquiet
from conquiet.web import Open, dashboard

assert conquiet.__file__.startswith(sys.argv[1]), conquiet.__file__
app = dashboard(auth=Open())
names = ("/", "/static/dashboard.css", "/static/dashboard.js", "/static/htmx.min.js")

async def ask():
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return [(await client.get(name)).status_code for name in (*names, "/static/icon.svg")]

assert asyncio.run(ask()) == [200] * 5
"""


def pip(*arguments: str | Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *map(str, arguments), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    pip("wheel", ".", "--no-build-isolation", "--wheel-dir", place)
    (made,) = place.glob("conquiet-*.whl")
    return made


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "conquiet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = set(ZipFile(wheel).namelist())
    assert wanted - inside == set()
    assert "conquiet/py.typed" in inside
    assert any(name.startswith("conquiet/sql/migrations/versions/0001") for name in inside)
    metadata = next(name for name in inside if name.endswith(".dist-info/METADATA"))
    assert any(name.endswith("/LICENSE") for name in inside)
    assert b"Requires-Dist: msgspec" in ZipFile(wheel).read(metadata)


def test_an_installed_wheel_migrates_and_shows(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip("install", "--target", target, wheel)
    database = f"sqlite:///{tmp_path / 'fresh.sqlite'}"
    for program in (MIGRATES, SHOWS):
        command = [sys.executable, "-c", program, str(target), database]
        done = subprocess.run(
            command, cwd=tmp_path, env={"PYTHONPATH": str(target)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
