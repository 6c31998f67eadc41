"""Run the Lua scripts of this directory by their hash; send them whole if Redis lacks them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

Argument = str | bytes | int

AT_ONCE = 1000
"""Entries that one call of a script handles at most, so that other clients get their turn."""


class Script:
    """Hold one file of `scripts/`, whose head explains its keys and arguments."""

    def __init__(self, name: str) -> None:
        self.body = files(__package__).joinpath("scripts", f"{name}.lua").read_bytes()
        # Redis names a script by its SHA-1; it is no matter of safety.
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
taken = Script("taken")
unbind = Script("unbind")
unsubscribe = Script("unsubscribe")
