"""A message that is shared among workers, settled in any order, against a model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from conquiet import Acking
from conquiet.acking import State

SETTINGS = settings(max_examples=60, stateful_step_count=20, database=None, derandomize=True)


def test_any_order_of_acks_and_nacks_settles_a_shared_message_once():
    class Machine(RuleBasedStateMachine):
        """A message that is shared, and shared again, among workers that settle it in any order.

        The model: a share says what it first said; one that was split says nack as soon as one
        of its parts does, else ack when all of them have; what it said is final.
        """

        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []
            root = Acking.calling(
                lambda: self.heard.append("acked"), lambda error: self.heard.append("nacked")
            )
            self.ackings = [root]
            self.parent: list[int | None] = [None]
            self.parts: list[int] = [0]
            self.said: list[list[str]] = [[]]

        @rule(which=st.integers(0, 50), count=st.integers(1, 3))
        def split(self, which: int, count: int) -> None:
            which %= len(self.ackings)
            if self.parts[which] or self.said[which]:
                return
            self.parts[which] = count
            for share in self.ackings[which].split(count):
                self.ackings.append(share)
                self.parent.append(which)
                self.parts.append(0)
                self.said.append([])

        @rule(which=st.integers(0, 50), good=st.booleans())
        def settle(self, which: int, good: bool) -> None:
            which %= len(self.ackings)
            acking = self.ackings[which]
            if self.parts[which]:
                return
            expected = not self.said[which]
            assert (acking.ack() if good else acking.nack()) is expected
            if expected:
                self.said[which].append("acked" if good else "nacked")
                self.tell(which)

        def tell(self, which: int) -> None:
            above = self.parent[which]
            if above is None or self.said[above]:
                return
            words = [
                self.said[n][0] for n, up in enumerate(self.parent) if up == above and self.said[n]
            ]
            if "nacked" in words or len(words) == self.parts[above]:
                self.said[above].append("nacked" if "nacked" in words else "acked")
                self.tell(above)

        @invariant()
        def agree(self) -> None:
            assert self.heard == self.said[0]
            for acking, said in zip(self.ackings, self.said, strict=True):
                assert acking.state is (State(said[0]) if said else State.PENDING)

    run_state_machine_as_test(Machine, settings=SETTINGS)
