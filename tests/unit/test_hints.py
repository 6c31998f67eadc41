"""Type hints that users rely on, as mypy reads them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    from collections.abc import Iterator
    from typing import Any, assert_type

    from conquiet import Message
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
"""


@pytest.mark.slow
def test_middlewares_and_guards_keep_the_hints_of_what_they_decorate(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stdout
