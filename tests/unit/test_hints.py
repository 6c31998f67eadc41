"""Type hints that users rely on, as mypy reads them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
    from collections.abc import Iterator
    from typing import Any, assert_type

    from sqlalchemy.ext.asyncio import AsyncSession

    from conquiet import App, Message
    from conquiet.events import Idempotency
    from conquiet.middleware import per_message

    @per_message
    def timed(message: Message[Any]) -> Iterator[None]:
        yield

    def decorate(idempotency: Idempotency) -> None:
        @idempotency.guard("mailer", lambda event: str(event))
        def send(event: str) -> int:
            return 1

        assert_type(send("1"), int | None)
        send(2)  # type: ignore[arg-type]

        @idempotency.guard("mailer", lambda event: str(event))
        async def post(event: str) -> int:
            return 1

        async def main() -> None:
            assert_type(await post("1"), int | None)

    async def emit(app: App, session: AsyncSession) -> None:
        assert_type(await app.emit(session, 1), list[str])
        app.emit(session, 1)  # type: ignore[unused-coroutine]  # a missing await is found
"""


@pytest.mark.slow
def test_middlewares_guards_and_emit_have_the_hints_that_users_rely_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stdout


def blocks(document: str) -> list[tuple[str, str]]:
    """The names and texts of Python blocks; one without a name is named after its place."""
    text = (ROOT / document).read_text()
    found = re.finditer(r'^```python(?: title="(\w+)\.py")?\n(.*?)^```', text, re.M | re.S)
    return [(block[1] or f"block_{place}", block[2]) for place, block in enumerate(found)]


@pytest.mark.slow
def test_the_examples_of_an_app_are_typed_strictly(tmp_path: Path) -> None:
    for name, text in blocks("docs/quickstart.md"):
        if not name.startswith("block_"):
            (tmp_path / f"{name}.py").write_text(text)
    [readme] = [text for name, text in blocks("README.md") if name == "shop"]
    (tmp_path / "readme.py").write_text(readme)
    pages = ("docs/app.md", "docs/how-to/emit.md")
    for page in pages:
        parts = [text for _, text in blocks(page)]
        if page == "docs/app.md":
            parts = parts[:4]  # the last ones define the same names once more
        (tmp_path / f"{Path(page).stem}_page.py").write_text("".join(parts))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "."]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stdout
