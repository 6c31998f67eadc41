"""Sending: commands to the workers, telemetry and bad events straight into the log."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from conquiet.errors import ConquietError
from conquiet.message import Message
from conquiet.redis import StreamSink
from conquiet.sink import Sink
from marketplace.demo.publishing import Stutter
from marketplace.demo.servers import Servers
from marketplace.demo.settings import COMMANDS, WORKERS
from marketplace.demo.world import World

_CHUNKS = 40


class Sender:
    """Sends everything in parts, so that commands, telemetry and bad events come side by side."""

    def __init__(self, servers: Servers, world: World, seed: int) -> None:
        self._client = servers.client
        self._world = world
        self._commands = Stutter(
            StreamSink(self._client, COMMANDS, partitions=WORKERS), Random(seed)
        )
        self._log = StreamSink(self._client)

    @property
    def repeated(self) -> int:
        """How many commands were sent twice."""
        return self._commands.repeated

    def send_half(self) -> None:
        self._send(range(_CHUNKS // 2))

    def send_rest(self) -> None:
        self._send(range(_CHUNKS // 2, _CHUNKS))

    def _send(self, chunks: range) -> None:
        world = self._world
        for number in chunks:
            _publish(self._commands, _part(world.commands, number))
            _publish(self._log, _part(world.telemetry, number))
            _publish(self._log, _part(world.bad, number))

    def close(self) -> None:
        self._commands.close()
        self._log.close()
        self._client.close()


def _part(messages: Sequence[Message[Any]], number: int) -> Sequence[Message[Any]]:
    count = len(messages)
    return messages[count * number // _CHUNKS : count * (number + 1) // _CHUNKS]


def _publish(sink: Sink, messages: Sequence[Message[Any]]) -> None:
    if not messages:
        return
    failed = [answer for answer in sink.publish(messages) if answer is not None]
    if failed:
        raise ConquietError(f"{len(failed)} messages could not be sent: {failed[0]}")
