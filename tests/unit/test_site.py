"""The docs as a site: it builds strictly, fetches nothing, and its reference is complete."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import types
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "conquiet"
NOT_FOR_USERS = ("cli", "marketplace")
"""Rooms whose names are documented by pages of their own, or by --help."""


def load(name: str) -> types.ModuleType:
    """A script of the site; scripts/ is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public_names() -> set[str]:
    """Every name that a room lists in its `__all__`, without importing it."""
    found = set()
    for path in sorted(PACKAGE.rglob("__init__.py")):
        room = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        if room.split(".")[1:2] and room.split(".")[1] in NOT_FOR_USERS:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {f"{room}.{name}" for name in ast.literal_eval(node.value)}
    return found


def documented(site: Path) -> set[str]:
    """The names of the site's inventory, which other sites link to."""
    _, _, _, _, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_builds_fetches_nothing_from_elsewhere_and_documents_every_public_name(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    named = documented(tmp_path)
    # A function that is called as its module is documented under the name of both.
    twice = {name for name in public_names() if f"{name}.{name.rpartition('.')[2]}" in named}
    assert public_names() - named - twice == set()
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text())


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://unpkg.com/x"></script>',
        "<link rel=stylesheet href=//fonts.example/css>",
        "<style>@import url(https://fonts.example/css);</style>",
        '<img alt="badge" src="https://img.example/badge.svg">',
    ],
)
def test_what_a_page_would_fetch_is_a_warning(html: str, caplog: pytest.LogCaptureFixture) -> None:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))
    load("site_hooks").on_post_page(html, page)
    assert "page.md fetches from elsewhere" in caplog.text


def test_links_and_pictures_of_the_site_itself_are_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    html = '<a href="https://example.org">x</a><script src="../a.js"></script><p>one\n- two</p>'
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))
    load("site_hooks").on_post_page(html, page)
    assert caplog.messages == ["page.md: a list needs an empty line before it: <p>one\n- "]


def test_examples_in_docstrings_become_code() -> None:
    text = "What it does.\n\n    >>> 1 + 1\n    2\n\nMore."
    assert load("site_doctests").fenced(text) == (
        "What it does.\n\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    )
