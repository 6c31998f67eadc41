"""The part of the contract of a source that is about replay."""

from __future__ import annotations

from typing import Any

import pytest

from conquiet.message import Message
from conquiet.source import Replayable
from conquiet.testing.contracts.consuming import Consuming
from conquiet.testing.contracts.samples import ATTRIBUTES, PAYLOADS, content, ids


class Replaying(Consuming):
    """Reads a source again without moving it. As needed: `position`."""

    bindings = Consuming.bindings | {"position"}

    def position(self, message: Message[Any]) -> str:
        """What `replay` takes as start or end for this message."""
        position: str = message.locals["position"]
        return position

    def test_a_replay_does_not_move_the_live_position(self) -> None:
        source = self._replayable()
        sent = self.send(5)
        for message in self.take(source, 2, limit=2):
            message.ack()
        assert ids(list(source.replay())) == sent
        assert ids(self.take(source, 3)) == sent[2:]

    def test_a_replay_goes_from_start_to_end_both_included(self) -> None:
        source = self._replayable()
        sent = self.send(5)
        places = [self.position(message) for message in source.replay()]
        assert ids(list(source.replay(places[1], places[3]))) == sent[1:4]
        assert ids(list(source.replay(places[3]))) == sent[3:]
        assert ids(list(source.replay(None, places[1]))) == sent[:2]

    def test_a_replay_gives_what_was_acked_byte_for_byte(self) -> None:
        source = self._replayable()
        sent = Message(PAYLOADS["binary"], {**ATTRIBUTES, "id": "m"}, topic="orders")
        self.publish([sent])
        self.take(source, 1)[0].ack()
        assert [content(message) for message in source.replay()] == [content(sent)]

    def _replayable(self) -> Any:
        source = self.consumer()
        if not isinstance(source, Replayable):
            pytest.skip("this source cannot be replayed")
        return source
