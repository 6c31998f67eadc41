"""An explicit-state model checker: all states that a few processes can reach, breadth first.

A model has a state, which is hashable, and steps. A step is a method that yields what may happen
next, as a result and the state behind it; nothing, if it cannot happen now. Steps of a process
(`step`) are tried for each process, steps of the world (`world`), such as the end of a lease, once.

`check` visits every reachable state. It raises `Violation`, with the shortest way there, for

- a state that `wrong` objects to;
- a stuck state: one from which no state can be reached in which all is done (`is_done`).

`replay` asks another question: whether a trace that real processes left is one of the model's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

State = Any
"""A hashable value; each model has a NamedTuple of its own."""
Outcome = tuple[str, State]
WORLD = -1


class Label(NamedTuple):
    """Names a step that was taken: by which process, which one, with which result."""

    process: int
    step: str
    result: str

    def __str__(self) -> str:
        who = "" if self.process == WORLD else f"process {self.process}: "
        return f"{who}{self.step.replace('_', ' ')}{f' -> {self.result}' if self.result else ''}"


def step(method: Callable[..., Iterator[Outcome]]) -> Callable[..., Iterator[Outcome]]:
    """Mark a method as a step of a process; its docstring names the function that it models."""
    method.of_world = False  # type: ignore[attr-defined]
    return method


def world(method: Callable[..., Iterator[Outcome]]) -> Callable[..., Iterator[Outcome]]:
    """Mark a method as a step of the world: time passes, a server or an operator acts."""
    method.of_world = True  # type: ignore[attr-defined]
    return method


class Model:
    """What a model must have. `without` names guards of the code that this model leaves out."""

    guards: ClassVar[Mapping[str, str]] = {}
    """The guards by name, and what goes wrong without each."""
    hidden: ClassVar[frozenset[str]] = frozenset()
    """Steps that no trace records."""
    processes: int = 2

    def __init__(self, *, without: str = "") -> None:
        assert not without or without in self.guards, f"{without!r} is no guard of this model"
        self._without = without
        own = [getattr(self, name) for name in dir(type(self)) if not name.startswith("_")]
        found = [method for method in own if hasattr(method, "of_world")]
        self._own = [(method.__name__, method) for method in found if not method.of_world]
        self._world = [(method.__name__, method) for method in found if method.of_world]

    def has(self, guard: str) -> bool:
        """Return whether this model has a guard."""
        return self._without != guard

    def initial(self) -> State:
        raise NotImplementedError

    def wrong(self, state: State) -> str | None:
        """Return what must never be and is so in this state."""
        raise NotImplementedError

    def is_done(self, state: State) -> bool:
        """Return whether all that was promised has happened."""
        raise NotImplementedError

    def canonical(self, state: State) -> State:
        """Return the state that stands for all that differ in names alone."""
        return state

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield every step that may be taken next."""
        for process in range(self.processes):
            yield from self.steps_of(state, process)
        yield from self.steps_of(state, WORLD)

    def steps_of(self, state: State, process: int) -> Iterator[tuple[Label, State]]:
        """Yield every step of one process, or of the world."""
        given = () if process == WORLD else (process,)
        for name, method in self._world if process == WORLD else self._own:
            for result, after in method(state, *given):
                yield Label(process, name, result), self.canonical(after)


class Violation(AssertionError):
    """Shows what is wrong, and the shortest way there."""

    def __init__(self, why: str, path: Iterable[Label], state: State) -> None:
        self.why = why
        self.path = list(path)
        lines = [f"{number:3}. {label}" for number, label in enumerate(self.path, 1)]
        super().__init__("\n".join([why, *lines, f"state: {state}"]))


@dataclass
class Visit:
    """What a check has seen."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    """The most steps that any state needs."""
    taken: set[str] = field(default_factory=set)
    """The steps, by name and result, that occurred at all."""


def check(model: Model, *, most: int = 400_000) -> Visit:
    """Visit all states; raise `Violation` for the first that is wrong, or from which no way leads
    to the end."""
    visit = Visit()
    first = model.canonical(model.initial())
    came: dict[Hashable, tuple[State, Label] | None] = {first: None}
    before: dict[Hashable, list[State]] = {}
    """The states that lead to a state, for the way back from the end."""
    level = deque([(first, 0)])
    done: list[State] = []
    while level:
        state, depth = level.popleft()
        visit.depth = depth
        why = model.wrong(state)
        if why is not None:
            raise Violation(why, _way(came, state), state)
        if model.is_done(state):
            done.append(state)
        for label, after in model.steps(state):
            visit.steps += 1
            visit.taken.add(f"{label.step} {label.result}".strip())
            before.setdefault(after, []).append(state)
            if after not in came:
                came[after] = (state, label)
                level.append((after, depth + 1))
        assert len(came) < most, f"more than {most:,} states: choose smaller bounds"
    visit.states = len(came)
    can_end = set(done)
    while done:
        for state in before.get(done.pop(), ()):
            if state not in can_end:
                can_end.add(state)
                done.append(state)
    stuck = next((state for state in came if state not in can_end), None)  # in order of depth
    if stuck is not None:
        raise Violation("stuck: from here the end cannot be reached", _way(came, stuck), stuck)
    return visit


def _way(came: Mapping[Hashable, tuple[State, Label] | None], state: State) -> list[Label]:
    path: list[Label] = []
    while (last := came[state]) is not None:
        state, label = last
        path.append(label)
    return path[::-1]


# --- traces -------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """Something that a real process did, in the words of a model.

    It took effect at some moment between `begin` and `end`, by a clock that all processes share.
    Without an end the process died: it took effect then, later, or never.
    """

    process: int
    step: str
    result: str
    begin: float
    end: float | None


class NotAllowed(AssertionError):
    """Names the operation of a trace that the model does not allow."""

    def __init__(self, operation: Operation, others: Iterable[str], before: list[Operation]):
        self.operation = operation
        instead = ", ".join(sorted(others)) or "nothing"
        last = "\n".join(f"  {item}" for item in before[-12:])
        super().__init__(
            f"the model does not allow {operation}; it allows {instead} there, after\n{last}"
        )


def replay(
    model: Model,
    operations: Iterable[Operation],
    *,
    allows: Callable[[Label, float], bool] = lambda label, now: True,
    most: int = 200_000,
) -> int:
    """Check that a trace is one of the model's; return how many states it may have ended in.

    All orders are tried that agree with begins and ends, with any steps in between that no trace
    records: those of the world, of dead processes, and `Model.hidden`. `allows` may forbid some of
    them at a moment, such as the end of a lease before its time.
    """
    known = sorted(operations, key=lambda item: item.begin)
    moments = [(item.begin, 0, number) for number, item in enumerate(known)]
    moments += [(item.end, 1, number) for number, item in enumerate(known) if item.end is not None]
    left = Counter(item.process for item in known)
    """How many operations each process has still to do; one that has some is alive."""
    open_: dict[int, Operation] = {}
    ends: list[Operation] = []
    could = {(model.canonical(model.initial()), frozenset[int]())}
    """States, with the numbers of the open operations that have taken effect."""
    for now, is_end, number in sorted(moments):
        item = known[number]
        dead = {process for process, count in left.items() if not count}
        could = _closure(model, could, open_, dead, now, allows, most)
        if not is_end:
            open_[number] = item
            left[item.process] -= item.end is None
            continue
        left[item.process] -= 1
        passed = {(state, done - {number}) for state, done in could if number in done}
        if not passed:
            others = {
                str(label)
                for state, _ in could
                for label, _ in model.steps_of(state, item.process)
                if label.step == item.step and label.result
            }
            raise NotAllowed(item, others, ends)
        could = passed
        del open_[number]
        ends.append(item)
    return len(could)


def _closure(
    model: Model,
    could: set[tuple[State, frozenset[int]]],
    open_: Mapping[int, Operation],
    dead: set[int],
    now: float,
    allows: Callable[[Label, float], bool],
    most: int,
) -> set[tuple[State, frozenset[int]]]:
    """Return all that may be before `now`, with the operations that are open."""
    found = set(could)
    new = list(could)
    while new:
        state, done = new.pop()
        following: dict[int, int] = {}
        """The next operation of each process; those of one process keep their order."""
        for place, item in open_.items():
            if place not in done:
                following.setdefault(item.process, place)
        for label, after in model.steps(state):
            place = following.get(label.process, -1)
            operation = open_.get(place)
            now_done = done
            if label.process == WORLD or label.step in model.hidden:
                if not allows(label, now):
                    continue
            elif label.step == "crash":
                if label.process not in dead:
                    continue
            elif operation is None or operation.step != label.step:
                continue
            elif label.result:
                if operation.end is not None and label.result != operation.result:
                    continue
                now_done = done | {place}
            if model.wrong(after) is not None:
                continue
            if (after, now_done) not in found:
                found.add((after, now_done))
                new.append((after, now_done))
        assert len(found) < most, "too many states may explain this trace: shorten it"
    return found
