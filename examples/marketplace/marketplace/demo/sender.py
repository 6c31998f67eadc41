"""The sender: commands to the workers; telemetry and bad events into the log."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from conquiet import Message
from conquiet.redis import StreamSink
from conquiet.sink import Sink
from marketplace.demo.servers import Servers
from marketplace.demo.settings import COMMANDS, DUPLICATES, WORKERS
from marketplace.demo.world import World

_CHUNKS = 40


class DuplicatingSink(Sink):
    """Publishes a share of the messages twice, as every broker does sooner or later."""

    def __init__(self, sink: Sink, random: Random, share: float = DUPLICATES) -> None:
        self.duplicates = 0
        self._sink = sink
        self._random = random
        self._share = share

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Exception | None]:
        twice = [message for message in messages if self._random.random() < self._share]
        self.duplicates += len(twice)
        return self._sink.publish_each([*messages, *twice])[: len(messages)]

    def close(self) -> None:
        self._sink.close()


class Sender:
    """Sends everything in chunks, so that commands, telemetry and bad events are interleaved."""

    def __init__(self, servers: Servers, world: World, seed: int) -> None:
        self._client = servers.client
        self._world = world
        self._commands = DuplicatingSink(
            StreamSink(self._client, COMMANDS, partitions=WORKERS), Random(seed)
        )
        self._log = StreamSink(self._client)

    @property
    def duplicates(self) -> int:
        """How many commands were sent twice."""
        return self._commands.duplicates

    def send_half(self) -> None:
        self._send(range(_CHUNKS // 2))

    def send_rest(self) -> None:
        self._send(range(_CHUNKS // 2, _CHUNKS))

    def _send(self, chunks: range) -> None:
        world = self._world
        for number in chunks:
            self._commands.publish(_chunk(world.commands, number))
            self._log.publish(_chunk(world.telemetry, number))
            self._log.publish(_chunk(world.bad, number))

    def close(self) -> None:
        self._commands.close()
        self._log.close()
        self._client.close()


def _chunk(messages: Sequence[Message[Any]], number: int) -> Sequence[Message[Any]]:
    count = len(messages)
    return messages[count * number // _CHUNKS : count * (number + 1) // _CHUNKS]
