"""Standing: tells Redis how far a query has come, for those who trim and those who watch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from conquiet.errors import ConfigError
from conquiet.redis.topic import beside
from conquiet.redis.wire import Command, Wire
from conquiet.spark.log.asking import ask
from conquiet.spark.log.offsets import Position

logger = logging.getLogger("conquiet.spark")


class Standing:
    """Registers positions under a name, and mirrors them in a group, if asked to."""

    def __init__(self, client: Any, reader: str, group: str) -> None:
        self._wire = Wire(client)
        self._reader = reader
        self._group = group.encode()
        self._told: dict[str, Position] = {}

    def tell(self, positions: Mapping[str, Position]) -> None:
        """These entries are done with, and all that follow are not."""
        news = {
            stream: position
            for stream, position in positions.items()
            if self._told.get(stream) != position
        }
        if not news or not (self._reader or self._group):
            return
        commands: list[tuple[bytes, Command]] = []
        for stream, position in news.items():
            key = stream.encode()
            if self._reader:
                readers = beside(stream, "conquiet:readers:").encode()
                commands.append((readers, (b"HSET", readers, self._reader, position.id)))
            if self._group and position.added is not None:
                if stream not in self._told:
                    create = (b"XGROUP", b"CREATE", key, self._group, position.id)
                    commands.append((key, create))
                at = (position.id.encode(), b"ENTRIESREAD", position.added)
                commands.append((key, (b"XGROUP", b"SETID", key, self._group, *at)))
        self._send(commands)
        self._told.update(news)

    def _send(self, commands: list[tuple[bytes, Command]]) -> None:
        for (_, command), reply in zip(commands, ask(self._wire, commands), strict=True):
            if not isinstance(reply, Exception) or str(reply).startswith("BUSYGROUP"):
                continue
            if command[0] == b"HSET":
                raise ConfigError(f"the position of the reader cannot be registered: {reply}")
            logger.warning("the position is not mirrored in group %r: %s", self._group, reply)
