"""Every state of small models is visited; and each guard of the code, left out, is missed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
from tests.models.checker import Model, Outcome, Violation, check, step
from tests.models.log_group import LogGroup
from tests.models.outbox_claim import OutboxClaim
from tests.models.redis_inbox import RedisInbox

MODELS = (RedisInbox, OutboxClaim, LogGroup)
NO_FAULTS = {"crashes": 0, "losses": 0}


def bounded(kind: type[Model], states: int, **bounds: Any) -> Any:
    named = ", ".join(f"{name}={value}" for name, value in bounds.items())
    return pytest.param(kind, states, bounds, id=f"{kind.__name__} {named}")


@pytest.mark.parametrize(
    ("kind", "states", "bounds"),
    [
        bounded(RedisInbox, 9_000, crashes=0, losses=0),
        bounded(OutboxClaim, 20_000, keys="ab"),
        bounded(OutboxClaim, 9_000, ordered=True, keys="aa"),
        bounded(LogGroup, 30_000, late=True, failures=0, **NO_FAULTS),
    ],
)
def test_no_state_is_wrong_and_none_is_stuck(kind, states, bounds):
    visit = check(kind(**bounds))
    assert visit.states >= states, f"{visit.states} states: the model has lost steps"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "states", "bounds"),
    [
        bounded(RedisInbox, 70_000, entries=1),
        bounded(RedisInbox, 100_000, crashes=0),
        bounded(OutboxClaim, 20_000, crashes=0, losses=0),
        bounded(OutboxClaim, 90_000, ordered=True, losses=0),
        bounded(LogGroup, 70_000, keys="a", asks=True),
        bounded(LogGroup, 60_000, keys="aa", **NO_FAULTS),
        bounded(LogGroup, 70_000, keys="aba", members=1, lanes=2),
        bounded(RedisInbox, 100_000, losses=0),
        bounded(RedisInbox, 400_000),
        bounded(OutboxClaim, 100_000, losses=0),
        bounded(OutboxClaim, 400_000, ordered=True),
        bounded(LogGroup, 60_000, losses=0, failures=0),
        bounded(LogGroup, 90_000, crashes=0, failures=0),
        bounded(LogGroup, 250_000, **NO_FAULTS),
    ],
)
def test_no_state_of_larger_models_is_wrong_and_none_is_stuck(kind, states, bounds):
    visit = check(kind(**bounds), most=3_000_000)
    assert visit.states >= states, f"{visit.states} states: the model has lost steps"


NEEDS: dict[str, dict[str, Any]] = {
    "leases end": {"crashes": 1},
    "locks end with the connection": {"crashes": 1},
    "an abandoned lease is compared": {"losses": 1},
    "an unknown outcome keeps the key": {"losses": 1},
    "a move counts again what it had counted": {"losses": 1},
    "an unknown commit is looked up": {"losses": 1},
    "a waiting key is held": {"failures": 1, "keys": "aa"},
    "the log is read up to its horizon": {"late": True},
}
"""What must happen for a guard to be missed; most are missed while nothing fails."""


def guarded() -> Iterator[Any]:
    smallest = {RedisInbox: {}, OutboxClaim: {"keys": "ab"}, LogGroup: {"failures": 0}}
    for kind in MODELS:
        for guard, why in kind.guards.items():
            yield pytest.param(kind, smallest[kind], guard, why, id=f"{kind.__name__} {guard}")
    for guard, why in OutboxClaim.guards_of_order.items():
        yield pytest.param(OutboxClaim, {"ordered": True}, guard, why, id=f"ordered {guard}")


@pytest.mark.parametrize(("kind", "options", "guard", "why"), list(guarded()))
def test_without_a_guard_something_goes_wrong(kind, options, guard, why):
    with pytest.raises(Violation, match=why) as found:
        check(kind(**(NO_FAULTS | options | NEEDS.get(guard, {})), without=guard))
    assert found.value.path


@pytest.mark.parametrize("kind", MODELS)
def test_each_step_names_the_code_that_it_models(kind):
    """A function that is renamed, or removed, is missed here."""
    for name in dir(kind):
        method = getattr(kind, name)
        if not hasattr(method, "of_world"):
            continue
        names = re.findall(r"`(conquiet\.[\w.]+)`", method.__doc__)
        assert names or method.of_world or name == "crash", f"{name} names no function"
        for dotted in names:
            assert resolve(dotted) is not None


def resolve(dotted: str) -> object:
    """Import what a dotted name is the name of."""
    words = dotted.split(".")
    for count in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            found = getattr(found, word)
        return found
    raise LookupError(dotted)


# --- the checker itself -------------------------------------------------------------------------


class Counter(Model):
    """Two processes that read a number and write it back, one higher."""

    guards: ClassVar[Mapping[str, str]] = {"one at a time": "an increment was lost"}

    def initial(self):
        return 0, (None, None)

    @step
    def read(self, state, me) -> Iterator[Outcome]:
        number, own = state
        if own[me] is None and (own[1 - me] in (None, "done") or not self.has("one at a time")):
            yield "", (number, _with(own, me, number))

    @step
    def write(self, state, me) -> Iterator[Outcome]:
        _, own = state
        if isinstance(own[me], int):
            yield "", (own[me] + 1, _with(own, me, "done"))

    def wrong(self, state):
        number, own = state
        return "an increment was lost" if own == ("done", "done") and number != 2 else None

    def is_done(self, state):
        return state == (2, ("done", "done"))


def _with(own, me, value):
    return tuple(value if number == me else other for number, other in enumerate(own))


def test_a_check_counts_states_and_shows_the_shortest_way_to_a_wrong_one():
    visit = check(Counter())
    assert (visit.states, visit.depth) == (8, 4)
    with pytest.raises(Violation, match="an increment was lost") as found:
        check(Counter(without="one at a time"))
    assert [str(label) for label in found.value.path] == [
        "process 0: read",
        "process 1: read",
        "process 0: write",
        "process 1: write",
    ]


def test_a_check_finds_a_state_without_a_way_to_the_end():
    class Endless(Counter):
        def is_done(self, state):
            return state == (3, ("done", "done"))

    with pytest.raises(Violation, match="stuck"):
        check(Endless())
