"""Dead letters of a queue of Kombu or Celery on Redis Streams."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from typing import Any

from conquiet.errors import ConquietError
from conquiet.kombu import scripts
from conquiet.kombu.layout import BACK, GROUP, PRIORITIES, Keys
from conquiet.operations.dead_letters import Filter, Letter
from conquiet.operations.streams import time_of, translate_errors
from conquiet.operations.text import as_text, escape_surrogates, whole
from conquiet.redis import ids
from conquiet.redis.ids import FIRST, LAST
from conquiet.redis.wire import Wire

_PAGE = 200
_UNKNOWN_PRIORITY = 0
"""For letters that do not name theirs: every consumer reads the stream of this priority."""


class KombuLetters:
    """The letters of one queue, under the `global_keyprefix` of its application."""

    def __init__(self, client: Any, queue: str, prefix: str = "") -> None:
        self.name = f"queue {queue!r}"
        self.queue = queue
        self._keys = Keys(prefix)
        self._key = self._keys.dead(queue).encode()
        self._client = client
        self._wire = Wire(client)
        weakref.finalize(self, self._wire.close)

    def exists(self) -> bool:
        with translate_errors(self.name):
            return bool(self._wire.call(self._key, b"EXISTS", self._key))

    def scan(self, filter_: Filter, *, brief: bool = False) -> Iterator[tuple[Letter, Any]]:
        with translate_errors(self.name):
            last = self._wire.call(self._key, b"XREVRANGE", self._key, LAST, FIRST, b"COUNT", 1)
        at = b"0-0"
        while last and ids.parse(at) <= ids.parse(last[0][0]):
            with translate_errors(self.name):
                page = self._wire.call(
                    self._key, b"XRANGE", self._key, at, last[0][0], b"COUNT", _PAGE
                )
            for entry_id, fields in page:
                named = dict(zip(fields[::2], fields[1::2], strict=True))
                yield self._letter(entry_id, named), named
            if len(page) < _PAGE:
                return
            at = ids.next_after(page[-1][0])

    def _letter(self, entry_id: bytes, named: dict[bytes, bytes]) -> Letter:
        payload = named.get(b"m", b"")
        headers = _headers(payload)
        text, is_base64 = as_text(payload)
        return Letter(
            entry_id.decode(),
            headers.get("id", ""),
            headers.get("task", ""),
            headers.get("origin", ""),
            as_text(named.get(b"reason", b""))[0],
            "",
            whole(as_text(named.get(b"deliveries", b""))[0]),
            time_of(entry_id),
            "",
            self.queue,
            "",
            as_text(named.get(b"id", b""))[0],
            headers,
            text,
            is_base64,
        )

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        if b"m" not in raw:
            raise ConquietError(f"letter {letter.id}: holds no message")
        queue = to or self.queue
        with translate_errors(f"letter {letter.id} to queue {queue!r}"):
            if not self._wire.call(self._key, b"XRANGE", self._key, letter.id, letter.id):
                return False
            keys = [self._keys.queues, self._keys.stream(queue, _priority(raw))]
            values = [GROUP, self._keys.namespace, raw[b"m"], "", "", BACK, queue]
            if scripts.publish.call(self._client, keys, values):
                raise ConquietError(f"letter {letter.id}: queue {queue!r} has expired")
            self._wire.call(self._key, b"XDEL", self._key, letter.id)
        return True

    def remove(self, letter: Letter, raw: Any) -> bool:
        with translate_errors(self.name):
            return bool(self._wire.call(self._key, b"XDEL", self._key, letter.id))


def _priority(named: dict[bytes, bytes]) -> int:
    """Return the priority whose stream the message was read from."""
    found = whole(as_text(named.get(b"priority", b""))[0])
    return found if found in PRIORITIES else _UNKNOWN_PRIORITY


def _headers(payload: bytes) -> dict[str, str]:
    try:
        headers = json.loads(payload)["headers"]
        known = {name: str(value) for name, value in headers.items() if value is not None}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    # JSON may name half a surrogate pair, which no page and no terminal can show.
    return {escape_surrogates(name): escape_surrogates(value) for name, value in known.items()}
