"""Wheel and source distribution hold all that an installed conquiet needs, on each Python."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
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


SMOKE = """
import sys
from importlib import metadata

assert "conquiet/__init__.py" in {str(file) for file in metadata.files("conquiet")}
assert sys.prefix != sys.base_prefix
from shop import Order, PlaceOrder, app

with app.test() as shop:
    shop.send(PlaceOrder("o-1", 4200))
    shop.redeliver()
    assert shop.rows("SELECT id, amount FROM orders") == [("o-1", 4200)]
    assert [event.type for event in shop.outbox] == ["order.placed"]
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


# --- the package index --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "-d", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = place.glob("conquiet-*.tar.gz")
    return made


def test_the_source_distribution_can_be_tested(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", "constraints.txt", "scripts/setup.sh", "tests/conftest.py", "mkdocs.yml"}
    wanted |= {"README.md", "docs/index.md", "examples/marketplace/pyproject.toml", "bench/core.py"}
    assert wanted - names == set()


def test_the_metadata_say_what_the_project_file_says(wheel: Path) -> None:
    archive = ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_string(archive.read(name).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata.get_all("Classifier") == project["classifiers"]
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert not {"dev", "docs"} & set(metadata.get_all("Provides-Extra"))
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_redis_brings_no_prometheus_client() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert [line.partition(">")[0] for line in extras["redis"]] == ["redis", "hiredis"]
    assert extras["metrics"] == ["prometheus-client>=0.20"]


def test_the_readme_of_the_index_needs_no_file_beside_it(wheel: Path) -> None:
    archive = ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode().partition("\n\n")[2]
    assert text.startswith("# conquiet\n")
    assert "docs/images" not in text
    assert "The app (`docs/app.md`)" in text
    assert "## Read on" not in text
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    found = {link for pair in links for link in pair if link}
    assert {link for link in found if not link.startswith(("http", "#"))} == set()


# --- each Python --------------------------------------------------------------------------------


def find_python(version: str) -> str | None:
    """The interpreter of a version, on the path or among those of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *versions.glob(f"{version}.*/bin/python")):
        found = shutil.which(candidate)
        if found and _runs(found, version):
            return found
    return None


def _runs(python: str, version: str) -> bool:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return answer.stdout.strip() == version


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_it_is_installed_and_handles_a_message(
    version: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    made = request.getfixturevalue(kind)
    readme = (ROOT / "README.md").read_text()
    [shop] = re.findall(r'```python title="shop.py"\n(.*?)```', readme, re.DOTALL)
    (tmp_path / "shop.py").write_text(shop)
    own = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", own], check=True)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
    constraints = ["-c", ROOT / "constraints.txt"]
    subprocess.run([own / "bin/python", *install, *constraints, f"{made}[sql]"], check=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (["python", "-c", SMOKE], ["conquiet", "--version"], ["conquiet", "doctor"]):
        done = subprocess.run(
            [own / "bin" / command[0], *command[1:]],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
