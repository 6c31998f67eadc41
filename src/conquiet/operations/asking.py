"""Asking: what goes wrong between an operator and Redis, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from conquiet.errors import ConquietError, NotFound, StoreError
from conquiet.redis.wire import Wire

_MISSING = ("no such key", "nogroup")


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Errors of Redis about `what` as errors of conquiet."""
    try:
        yield
    except redis.ResponseError as error:
        raise told(error, what) from error
    except (redis.RedisError, OSError) as error:
        raise StoreError(f"{what}: Redis cannot be reached: {error}") from error


@contextmanager
def wired(client: Any, what: str) -> Iterator[Wire]:
    """A wire to ask about `what`; connections that it made for itself are closed at the end."""
    with asking(what):
        wire = Wire(client)
        try:
            yield wire
        finally:
            wire.close()


def told(error: Exception, what: str) -> ConquietError:
    text = str(error)
    if "WRONGTYPE" in text:  # a script says where it happened first
        return NotFound(
            f"{what}: this key holds something else than a stream; conquiet streams list shows"
            " which there are"
        )
    if any(words in text.lower() for words in _MISSING):
        return NotFound(f"{what}: is not there; conquiet streams list shows streams and groups")
    return StoreError(f"{what}: {text}")
