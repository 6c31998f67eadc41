"""Where dead letters lie: streams of our own, and those of queues of Kombu and Celery.

Both are streams, and are called by the name of the stream.
"""

from __future__ import annotations

from typing import Any

from conquiet.errors import NotFound
from conquiet.operations.dead_letters import Letters

_OF_KOMBU = "conquiet:kombu:dead:"
"""As in `conquiet.kombu.layout`: the key prefix of the application before, the queue after."""


def is_of_kombu(stream: str) -> bool:
    return _OF_KOMBU in stream


def letters_of(client: Any, stream: str) -> Letters:
    if not is_of_kombu(stream):
        from conquiet.operations import StreamLetters

        return StreamLetters(client, stream)
    try:
        from conquiet.operations import KombuLetters
    except ModuleNotFoundError as error:
        raise NotFound(
            f"{stream!r} are dead letters of Celery, which need {error.name}: pip install"
            " 'conquiet[kombu]' where the dashboard runs"
        ) from error
    prefix, _, queue = stream.partition(_OF_KOMBU)
    return KombuLetters(client, queue, prefix)


def letter_places(client: Any, pattern: str) -> dict[str, int]:
    """The streams with dead letters, and how many each has."""
    from conquiet.operations import letter_streams
    from conquiet.operations.asking import asking
    from conquiet.operations.survey import names_of
    from conquiet.redis.wire import Wire

    found = letter_streams(client, pattern)
    with asking(f"streams {pattern!r}"):
        wire = Wire(client)
        for name in names_of(wire, pattern):
            if is_of_kombu(name):
                found[name] = int(wire.call(name.encode(), b"XLEN", name))
    return {name: count for name, count in sorted(found.items()) if count}
