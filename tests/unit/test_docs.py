"""The documentation is code: Python blocks, `$ conquiet …`, `$ python …` and doctests all run.

The blocks of a document run in order, in one namespace, in an empty directory and a process of
their own. A block with a title, as in ```python title="app.py", is written to that file first; of
other languages than Python, it is only written; if it names a file of this repository, it must be a
part of that file, which has tests of its own. There is no way to leave a block out.

A command that ends with & runs in the background until the document ends; then it is told to stop,
and must end well.

Where a document names REDIS_URL or DATABASE_URL, the variable names an empty server of the tests.
A doctest may use `client`, a Redis client, and `async_client`, one of `redis.asyncio`, without
making it.
"""

from __future__ import annotations

import doctest
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVERS = {
    "REDIS_URL": "redis_url",
    "CONQUIET_BROKER_URL": "redis_url",
    "DATABASE_URL": "database_url",
    "CONQUIET_DATABASE_URL": "database_url",
}
MODULES = sorted((ROOT / "src" / "conquiet").rglob("*.py"))

_fence = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_title = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str
    line: int
    """Where the text begins in its document."""

    @property
    def runs(self) -> bool:
        return self.quotes is None and (
            self.language in ("python", "console") or self.title is not None
        )

    @property
    def quotes(self) -> Path | None:
        """The file of this repository that it shows a part of."""
        path = ROOT / self.title if self.title else None
        return path if path is not None and path.is_file() else None

    def is_in(self, whole: str) -> bool:
        """Whether it is a part of that text, however deep it stands there."""
        return any(textwrap.indent(self.text, " " * depth) in f"\n{whole}" for depth in range(24))


def blocks(document: str) -> Iterator[Block]:
    for found in _fence.finditer(document):
        title = _title.search(found["info"])
        line = document.count("\n", 0, found.start("text")) + 1
        text = textwrap.dedent(found["text"])
        yield Block(found["language"], title[1] if title else None, text, line)


def commands(text: str) -> Iterator[str]:
    """The commands of a console block; the lines between them are output."""
    for found in re.finditer(r"^\$ ((?:.*\\\n)*.*)$", text, re.MULTILINE):
        yield found[1]


def run_document(path: Path) -> None:
    module = types.ModuleType("document")
    sys.modules["document"] = module  # where dataclasses and the like look names up
    sys.path.insert(0, os.getcwd())
    with ExitStack() as background:
        run_blocks(path, module, background)


def run_blocks(path: Path, module: types.ModuleType, background: ExitStack) -> None:
    for block in blocks(path.read_text()):
        if block.quotes is not None:
            continue
        if block.title is not None:
            Path(block.title).write_text(block.text)
        if block.language == "python":
            # As many empty lines before it as in the document: a traceback then fits.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(path), "exec", dont_inherit=True), module.__dict__)
        elif block.language == "console":
            for command in commands(block.text):
                if not command.startswith(("conquiet ", "python ")):
                    continue
                if command.endswith("&"):
                    background.enter_context(running(command.rstrip("& ")))
                else:
                    subprocess.run(["bash", "-c", command], check=True, timeout=200)


@contextmanager
def running(command: str) -> Iterator[None]:
    process = subprocess.Popen(["bash", "-c", f"exec {command}"])
    try:
        yield
        process.terminate()
        assert process.wait(60) == 0, f"{command}: ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()


def misquoted(path: Path) -> list[str]:
    """The blocks that are no part of the file they name."""
    return [
        f"{path.name}:{block.line}: not so in {block.title}"
        for block in blocks(path.read_text())
        if block.quotes is not None and not block.is_in(block.quotes.read_text())
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_shows_of_a_file_stands_there(path: Path) -> None:
    assert misquoted(path) == []


def test_what_does_not_stand_in_its_file_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "broken.md"
    document.write_text('```yaml title="compose.yaml"\nservices: {}\n```\n')
    assert misquoted(document) == ["broken.md:2: not so in compose.yaml"]


LONG = ("spark.md", "cli.md", "quickstart.md", "outbox.md", "celery.md", "migrations.md")
"""They start Spark, or a process for each of many commands."""


def documents_with_code() -> list[Path]:
    return [path for path in DOCUMENTS if any(block.runs for block in blocks(path.read_text()))]


@pytest.mark.timeout(450)  # a document about Spark starts several, and the machine may be busy
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path.name in LONG else [])
        for path in documents_with_code()
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_code_of_a_document_runs(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from tests import zygote  # not above: this file is also the program that it starts

    for block in blocks(path.read_text()):
        first = block.text.strip().partition("\n")[0]
        assert "not run" not in first, f"{path.name}:{block.line}: every block runs; mend this one"
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    servers = {
        name: request.getfixturevalue(fixture)
        for name, fixture in SERVERS.items()
        if re.search(rf"\b{name}\b", path.read_text())
    }
    done = zygote.run(
        [sys.executable, __file__, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PATH": programs, "PYTHONPATH": "", **servers},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def modules_with_examples() -> list[str]:
    names = []
    for path in MODULES:
        if ">>> " in path.read_text():
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


def examples(module: types.ModuleType) -> list[str]:
    found = doctest.DocTestFinder().find(module)
    return [example.source for test in found for example in test.examples]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    given = {}
    if any("client" in example for example in examples(module)):
        given["client"] = request.getfixturevalue("redis_client")
        url = request.getfixturevalue("redis_url")
        given["async_client"] = importlib.import_module("redis.asyncio").from_url(url)
    outcome = doctest.testmod(module, extraglobs=given)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_blocks_are_found_with_their_place_and_title() -> None:
    document = '# x\n\n```python\na = 1\n```\n\n- item\n\n  ```json title="f.json"\n  {}\n  ```\n'
    assert list(blocks(document)) == [
        Block("python", None, "a = 1\n", 4),
        Block("json", "f.json", "{}\n", 10),
    ]


def test_commands_may_go_on_in_the_next_line() -> None:
    assert list(commands("$ conquiet a \\\n    b\noutput\n$ ls\n")) == [
        "conquiet a \\\n    b",
        "ls",
    ]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 / 0\n```\n",
        "```console\n$ conquiet nonsense\n```\n",
        "```console\n$ conquiet nonsense &\n```\n",
    ],
)
def test_a_block_that_fails_is_noticed(
    text: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "broken.md").write_text(text)
    with pytest.raises(AssertionError):
        test_the_code_of_a_document_runs(tmp_path / "broken.md", tmp_path, request)


if __name__ == "__main__":
    run_document(Path(sys.argv[1]))
