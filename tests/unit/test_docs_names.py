"""What the docs name exists: tests, files of the repository, pages of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FOLDERS = "bench|deploy|docs|examples|scripts|src|tests"

_test = re.compile(r"`((?:tests|src)/[\w/]+\.py)::(test_\w+)`")
_file = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, and leaves alone what only Python can make of it."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def pages_of(entry: object) -> list[str]:
    """The pages that a part of the navigation names, at whatever depth."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_of(part)]


def named(page: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    return list(pattern.finditer(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_tests_and_files_that_a_page_names_exist(page: Path) -> None:
    for found in named(page, _test):
        source = ROOT / found[1]
        assert source.is_file(), f"{page.name} names {found[1]}"
        assert f"def {found[2]}(" in source.read_text(), f"{page.name} names {found[0]}"
    for found in named(page, _file):
        assert (ROOT / found[1]).exists(), f"{page.name} names {found[1]}"


def test_every_page_is_in_the_navigation_and_every_entry_has_a_page() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    listed = pages_of(settings["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(DOCS)) for page in PAGES}
