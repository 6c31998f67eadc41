"""The docs as a site: it builds strictly, fetches nothing, and its reference is complete."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests import needs

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("site")
def test_it_builds_strictly_and_documents_every_public_name(site: Path) -> None:
    named = documented(site)
    # A module is documented by its members, as is a function that is called like its module.
    modules = {one.rpartition(".")[0] for one in named}
    assert public_names() - named - modules == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("site")
def test_from_a_folder_its_search_finds_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        needs.missing("chromium", "apt-get install chromium")
    from playwright.sync_api import sync_playwright  # slow to import, and only here of use

    asked: list[str] = []
    complaints: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text))
        for name in ("index.html", "how-to/django.html"):
            page.goto((site / name).as_uri())
            page.locator(".md-search__input").click()
            page.keyboard.type("outbox")
            page.wait_for_selector(".md-search-result__item", timeout=60_000)
        browser.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith("file:")] == []


EXPLAINED_MODULES = ("conquiet.sql.schema", "conquiet.events.schema")
"""Modules that are no rooms, whose functions migrations call."""
OBVIOUS = {
    *("self", "cls", "args", "kwargs", "app", "batch", "catalog", "client", "config", "connection"),
    *("engine", "entries", "event", "events", "group", "id", "log", "message", "messages"),
    *("metadata", "msg", "name", "next", "output", "outputs", "payload", "queue", "queues"),
    *("redelivery", "request", "router", "signer", "sink", "source", "spark", "store", "stream"),
    *("streams", "table", "topic", "topics", "url", "version"),
}
"""Their type says what they are."""
OF_PROTOCOLS = {
    *("allow_delays", "publish", "publish_each", "read", "renew", "replay", "scope", "settle"),
}
"""Methods that `conquiet.source`, `conquiet.sink` and `conquiet.transaction` explain."""
NOT_CALLED = {
    *("conquiet.kombu.Transport", "conquiet.kombu.SentinelTransport", "conquiet.spark.LagListener"),
    *("conquiet.sql.schema.include_object", "conquiet.sql.schema.render_item"),
}
"""Functions, and classes whose methods, Kombu, Spark and Alembic call."""


def explained_callables() -> Iterator[tuple[str, Any, str, bool]]:
    """Yield functions, classes and methods with their text, and whether they are methods."""
    names = public_names()
    for name in EXPLAINED_MODULES:
        module = importlib.import_module(name)
        functions = inspect.getmembers(module, inspect.isfunction)
        names |= {f"{name}.{one}" for one, item in functions if item.__module__ == name}
    for name in sorted(names):
        room, _, short = name.rpartition(".")
        found = getattr(importlib.import_module(room), short, None)
        if (
            short.startswith("_")
            or ".contracts" in name
            or (name in NOT_CALLED and short.islower())
        ):
            continue
        if inspect.isfunction(found) and found.__module__.startswith("conquiet"):
            yield name, found, inspect.getdoc(found) or "", False
        if not inspect.isclass(found):
            continue
        if not issubclass(found, BaseException) or "__init__" in vars(found):
            yield name, found, constructor_text(found), False
        for method, member in vars(found).items():
            function = getattr(member, "__func__", member)
            if method.startswith("_") or method in OF_PROTOCOLS or name in NOT_CALLED:
                continue
            if inspect.isfunction(function):
                # A method without a docstring says what that of its base says.
                text = f"{inspect.getdoc(getattr(found, method))} {inspect.getdoc(found)}"
                yield f"{name}.{method}", function, text, True


def constructor_text(found: type) -> str:
    """Return what is written about a class, its constructor, and each field of theirs."""
    texts = []
    for base in found.__mro__[:-1]:
        texts += [inspect.getdoc(base) or "", inspect.getdoc(vars(base).get("__init__")) or ""]
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        except (OSError, TypeError):
            continue
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and ast.unparse(text).startswith(("'", '"')):
                texts.append(f"`{ast.unparse(field.target)}`")
    return " ".join(texts)


def is_explained(parameter: str, text: str, *, is_method: bool) -> bool:
    """A method may name it as a word: "Return the events of a type"."""
    if re.search(rf"`[^`]*\b{parameter}\b", text):
        return True
    words = parameter.rstrip("_s").replace("_", " ")
    return is_method and re.search(rf"\b{words}(s|ed)?\b", text, re.IGNORECASE) is not None


def test_the_reference_explains_each_parameter() -> None:
    unexplained = {}
    for name, found, text, is_method in explained_callables():
        try:
            parameters = inspect.signature(found).parameters
        except (TypeError, ValueError):  # a class of C, or a type alias
            continue
        missing = [
            one
            for one in parameters
            if one not in OBVIOUS and not is_explained(one, text, is_method=is_method)
        ]
        if missing:
            unexplained[name] = missing
    assert unexplained == {}, "say in the docstring what they do"


def test_pictures_are_as_their_texts_say_and_are_shown() -> None:
    pictures = load("pictures")
    folder = ROOT / "docs" / "images"
    shown = {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"images/([\w-]+)\.svg\)", page.read_text())
    }
    assert set(pictures.PICTURES) == shown - {"path"}
    for name, text in pictures.PICTURES.items():
        assert (folder / f"{name}.svg").read_text() == pictures.draw(text), (
            "run scripts/pictures.py"
        )
        for row in text.splitlines():
            boxed = re.sub(r"\[[^]]*\]|\([^)]*\)|\{[^}]*\}|<[^>]*>", "", row)
            assert set(boxed) <= set(" -|+>vx"), f"{name}: text outside of a box: {row}"


def test_pages_avoid_the_words_that_the_style_forbids() -> None:
    words = "somebody|nobody|whoever|anybody|everybody|anew|in earnest|dearer"
    odd = re.compile(rf"\b({words})\b", re.IGNORECASE)
    found = [
        f"{page.relative_to(ROOT)}: {word}"
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for word in odd.findall(page.read_text())
        if "adr" not in page.parts and page.name != "CHANGELOG.md"
    ]
    assert found == []


def test_no_page_draws_with_characters() -> None:
    drawn = [
        page.relative_to(ROOT).as_posix()
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        if re.search("[┌│▶▼◀]", page.read_text())
    ]
    assert drawn == []


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
    html = (
        '<link rel="canonical" href="https://example.org/page.html"><script src="../a.js"></script>'
        '<a href="https://example.org">x</a><p>one\n- two</p>'
    )
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))
    load("site_hooks").on_post_page(html, page)
    assert caplog.messages == ["page.md: a list needs an empty line before it: <p>one\n- "]


def test_examples_in_docstrings_become_code() -> None:
    text = "What it does.\n\n    >>> 1 + 1\n    2\n\nMore."
    assert load("site_doctests").fenced(text) == (
        "What it does.\n\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    )
