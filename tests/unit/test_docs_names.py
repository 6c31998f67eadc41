"""Names in docs and examples exist, and are exported: tests, files, pages, imports."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

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


# --- exported names ---------------------------------------------------------------------------

_reference = re.compile(r"^::: ([\w.]+)", re.MULTILINE)
_block = re.compile(r"^( *)```python.*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def documented() -> set[str]:
    """The modules, and single names, that the reference shows."""
    return {name for page in (DOCS / "reference").glob("*.md") for name in _references(page)}


def _references(page: Path) -> list[str]:
    return _reference.findall(page.read_text())


def imports_of(code: str) -> list[tuple[str, str | None]]:
    """Modules of conquiet that a program imports, with the names it takes from them."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [(node.module or "", alias.name) for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "conquiet"]


def is_exported(module: str, name: str | None, known: set[str]) -> bool:
    """Whether the reference shows a module and the module exports the name."""
    if name is None:
        return module in known
    whole = f"{module}.{name}"
    if whole in known:
        return True
    if module not in known:
        return False
    exported = getattr(import_module(module), "__all__", None)
    return name in exported if exported is not None else not name.startswith("_")


def programs() -> list[Path]:
    found = [ROOT / "README.md", *PAGES, *(ROOT / "examples").rglob("*.py")]
    return sorted(path for path in found if ".venv" not in path.parts)


@pytest.mark.parametrize("path", programs(), ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_and_examples_import_exported_names_only(path: Path) -> None:
    text = path.read_text()
    codes = [text]
    if path.suffix == ".md":
        codes = [textwrap.dedent(found[2]) for found in _block.finditer(text)]
    known = documented()
    wrong = {
        f"{module}.{name}" if name else module
        for code in codes
        for module, name in imports_of(code)
        if not is_exported(module, name, known)
    }
    assert not wrong, f"{path.name} imports names that are not exported: {sorted(wrong)}"


def count_lines(program: Path) -> int:
    """Lines that are neither empty, nor comments, nor the docstring of the module."""
    text = program.read_text()
    docstring = ast.parse(text).body[0]
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
        if number > (docstring.end_lineno or 0)
    )


def test_the_comparison_counts_the_lines_of_its_programs() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    peers = ("conquiet", "faststream", "celery", "procrastinate")
    rows = re.findall(r"^\| `(\w+)`: [^|]+\|(.+)\|$", page, re.M)
    assert len(rows) == 4
    for task, cells in rows:
        for peer, cell in zip(peers, cells.split("|"), strict=True):
            program = ROOT / "examples" / "compared" / f"{task}_{peer}.py"
            if cell.strip() == "–":
                assert not program.exists()
            else:
                assert count_lines(program) == int(cell), program.name


# --- parameters and flags in running text -----------------------------------------------------

_code = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_span = re.compile(r"`([^`\n]+)`")
_call = re.compile(r"^(?:sql\.)?(\w+)\((.*)\)$")
_keyword = re.compile(r"(?:^|, )([a-z]\w*)=")
_nested = re.compile(r"\([^()]*\)")
_flag = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def spans(page: Path) -> list[str]:
    """The code in the running text of a page."""
    return _span.findall(_code.sub("", page.read_text()))


def exported() -> dict[str, list[Callable[..., Any]]]:
    """What the modules of the reference export, by its short name."""
    found: dict[str, list[Callable[..., Any]]] = {}
    for module in sorted(documented()):
        try:
            names = import_module(module)
        except ModuleNotFoundError:  # the reference shows a single name of a module
            continue
        for name in getattr(names, "__all__", ()):
            if callable(item := getattr(names, name, None)):
                found.setdefault(name, []).append(item)
    return found


def takes(item: Callable[..., Any], keywords: list[str]) -> bool:
    parameters = inspect.signature(item).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return True
    return set(keywords) <= set(parameters)


def test_calls_in_running_text_name_parameters_that_exist() -> None:
    known = exported()
    wrong = []
    for page in (ROOT / "README.md", *PAGES):
        for span in spans(page) if "adr" not in page.parts else []:
            call = _call.match(span)
            if call is None or call[1] not in known:
                continue
            keywords = _keyword.findall(_nested.sub("", call[2]))
            if keywords and not any(takes(item, keywords) for item in known[call[1]]):
                wrong.append(f"{page.name}: {span}")
    assert wrong == []


def subcommands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            return dict(action.choices)
    return {}


@cache
def whole_parser() -> ArgumentParser:
    from conquiet.cli import build_parser

    return build_parser()


def commands(text: str) -> Iterator[tuple[str, ArgumentParser, set[str]]]:
    """Commands of conquiet with the flags that they are shown with."""
    whole = whole_parser()
    for line in re.findall(r"(?:^|(?<=[`$ ]))conquiet ([^`\n]+)", text.replace("\\\n", " ")):
        parser, words = whole, line.split()
        while words and words[0] in subcommands(parser):
            parser = subcommands(parser)[words.pop(0)]
        if parser is not whole and not subcommands(parser):
            yield line, parser, set(_flag.findall(" ".join(words)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_that_a_page_shows_have_their_flags(page: Path) -> None:
    for line, parser, flags in commands(page.read_text()):
        known = {option for action in parser._actions for option in action.option_strings}
        assert flags <= known, f"{page.name}: conquiet {line}"
