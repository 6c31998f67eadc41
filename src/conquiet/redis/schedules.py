"""Keep the states of schedules in a hash beside the outbox's stream, and write ticks into that.

The hash `{STREAM}:schedules` has a field per schedule, its state as JSON. The braces keep both keys
on one node of a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import redis

from conquiet.errors import StoreError
from conquiet.message import Message
from conquiet.redis.outbox import Outbox
from conquiet.schedule import State

# KEYS: hash. Returns the time as seconds and microseconds, then the fields.
_READ = "local t = redis.call('TIME') return {t[1], t[2], redis.call('HVALS', KEYS[1])}"
# KEYS: hash, stream. ARGV: name, former state or '', new state or '', then for each tick the number
# of its fields and values, and these. The state is written last: after an error in the middle of a
# script, what it wrote before stays.
_REPLACE = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
local at = 4
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  redis.call('XADD', KEYS[2], '*', unpack(ARGV, at + 1, at + count))
  at = at + count + 1
end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1])
else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
"""


class Schedules:
    """Keeps the states of one app's schedules; `outbox` takes the ticks."""

    def __init__(self, client: Any, outbox: Outbox) -> None:
        self._client = client
        self._outbox = outbox
        self._key = f"{{{outbox.stream}}}:schedules"

    def read(self) -> tuple[float, Sequence[State]]:
        seconds, micros, values = self._eval(_READ, 1, self._key)
        states = [msgspec.json.decode(value, type=State) for value in values]
        return int(seconds) + int(micros) / 1e6, states

    def replace(
        self, former: State | None, state: State | None, ticks: Sequence[Message[Any]] = ()
    ) -> bool:
        some = state or former
        assert some is not None, "one of the two exists"
        arguments: list[Any] = [some.name, _write(former), _write(state)]
        for tick in ticks:
            fields = self._outbox.fields(tick)
            arguments += (len(fields), *fields)
        return bool(self._eval(_REPLACE, 2, self._key, self._outbox.stream, *arguments))

    def _eval(self, script: str, *arguments: Any) -> Any:
        try:
            return self._client.eval(script, *arguments)
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"the schedules in {self._key}: {error}") from error


def _write(state: State | None) -> bytes:
    return b"" if state is None else msgspec.json.encode(state)
