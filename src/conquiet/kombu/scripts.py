"""Scripts: the Lua that lies beside this module, run by its hash, sent whole if Redis forgot it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

Argument = str | bytes | int

AT_ONCE = 1000
"""Entries that one script handles where there may be very many, so that others get their turn."""


class Script:
    """One file of `scripts/`; its keys and arguments are explained at its top."""

    def __init__(self, name: str) -> None:
        self.body = files(__package__).joinpath("scripts", f"{name}.lua").read_bytes()
        # Not for safety: it is how Redis names a script.
        self.sha = hashlib.sha1(self.body, usedforsecurity=False).hexdigest()

    def by_hash(self, keys: Sequence[str], args: Sequence[Argument]) -> tuple[Any, ...]:
        return "EVALSHA", self.sha, len(keys), *keys, *args

    def whole(self, keys: Sequence[str], args: Sequence[Argument]) -> tuple[Any, ...]:
        return "EVAL", self.body, len(keys), *keys, *args

    def call(self, client: Any, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        try:
            return client.execute_command(*self.by_hash(keys, args))
        except NoScriptError:
            return client.execute_command(*self.whole(keys, args))


bury = Script("bury")
declare = Script("declare")
delete = Script("delete")
fetch = Script("fetch")
giveback = Script("giveback")
leave = Script("leave")
publish = Script("publish")
purge = Script("purge")
reap = Script("reap")
renew = Script("renew")
requeue = Script("requeue")
settle = Script("settle")
size = Script("size")
strays = Script("strays")
subscribe = Script("subscribe")
sweep = Script("sweep")
unsubscribe = Script("unsubscribe")
