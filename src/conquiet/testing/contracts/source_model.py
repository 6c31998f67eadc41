"""A model of a source: no mix of publish, read, ack, nack and close loses or repeats a message."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from conquiet.errors import GivenBack
from conquiet.message import Message
from conquiet.source import Source
from conquiet.testing.contracts.samples import ids
from conquiet.testing.contracts.source import LONG, ConsumerContract

_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def check_source(contract: ConsumerContract) -> None:
    """Run the model against the source of a contract; each run leaves it empty."""
    runs = iter(range(1_000_000))

    class Model(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.run = next(runs)
            self.sent = 0
            self.unsettled: list[str] = []  # in the order of publication
            self.held: dict[str, Message[Any]] = {}
            self.tried: dict[str, int | None] = {}  # None: after a close it may count or not
            self.source: Source = contract.consumer(LONG)

        @rule(count=st.integers(1, 4))
        def publish(self, count: int) -> None:
            sent = contract.send(count, f"run{self.run}-{self.sent}")
            self.sent += 1
            self.unsettled.extend(sent)
            self.tried.update(dict.fromkeys(sent, 0))

        @rule(limit=st.integers(1, 5))
        def read(self, limit: int) -> None:
            ready = [name for name in self.unsettled if name not in self.held]
            messages = contract.take(self.source, min(limit, len(ready)), limit)
            assert sorted(ids(messages)) == sorted(set(ids(messages)) & set(ready))
            if contract.keeps_place:
                assert ids(messages) == ready[: len(messages)]
            for message in messages:
                tried = self.tried[message.id]
                assert tried is None or message.deliveries == tried + 1
                self.tried[message.id] = message.deliveries
                self.held[message.id] = message

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def ack(self, data: st.DataObject) -> None:
            message = self._any_held(data)
            message.ack()
            self.unsettled.remove(message.id)

        @precondition(lambda self: self.held)
        @rule(data=st.data(), blameless=st.booleans())
        def nack(self, data: st.DataObject, blameless: bool) -> None:
            message = self._any_held(data)
            message.nack(GivenBack("not now") if blameless else ValueError("failed"))
            if blameless:
                self.tried[message.id] = message.deliveries - 1

        @rule()
        def close_and_open_again(self) -> None:
            self.source.close()
            self.tried.update(dict.fromkeys(self.held))
            self.held.clear()
            self.source = contract.consumer(LONG)

        def teardown(self) -> None:
            self.close_and_open_again()
            rest = contract.take(self.source, len(self.unsettled))
            assert sorted(ids(rest)) == sorted(self.unsettled)
            for message in rest:
                message.ack()
            assert ids(self.source.read(100, 0.01)) == []
            self.source.close()

        def _any_held(self, data: st.DataObject) -> Message[Any]:
            name = data.draw(st.sampled_from(list(self.held)))
            return self.held.pop(name)

    run_state_machine_as_test(Model, settings=_SETTINGS)
