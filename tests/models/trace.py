"""Traces: what real processes did to real stores, in the words of the models.

`record` wraps the functions that the models name, in a process of a test or of the soak. Each call
becomes a line of JSON: who, which step, of which message or row, with which result, from when to
when by the monotonic clock, which all processes of a machine share. A call that did not return is a
line without an end. Nothing in conquiet knows of it.

`operations` reads the lines of one message, or of one key of an outbox, for `checker.replay`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.models.checker import Label, Operation, replay
from tests.models.outbox_claim import OutboxClaim
from tests.models.redis_inbox import RedisInbox

from conquiet.redis.lease import Leases
from conquiet.redis.source import StreamSource
from conquiet.redis.transaction import Unit, UnknownOutcome
from conquiet.sql.claim import Claimer, PsycopgClaimer

Call = dict[str, Any]
"""A line of a trace: process, number, step, begin, end, and the results by message or key."""


class Recorder:
    """Writes a line when a call begins, and one when it ends; a kill can only cost the second."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._number = 0
        self._lock = threading.Lock()

    def begin(self, step: str, subjects: Iterable[str] = ()) -> int:
        with self._lock:
            self._number += 1
            number = self._number
        self._write(number, {"begin": time.monotonic(), "step": step, "of": list(subjects)})
        return number

    def end(self, number: int, results: Mapping[str, Sequence[str]]) -> None:
        """Note the results by subject; several where one call was several steps of a model."""
        self._write(number, {"end": time.monotonic(), "results": results})

    def _write(self, number: int, about: dict[str, Any]) -> None:
        line = json.dumps({"process": os.getpid(), "number": number, **about})
        os.write(self._file, f"{line}\n".encode())


def record(path: Path) -> None:
    """Wrap the steps of inbox and relay in this process."""
    recorder = Recorder(path)
    _wrap_inbox(recorder)
    _wrap_claims(recorder)


def _wrap_inbox(recorder: Recorder) -> None:
    read, acquire, renew = StreamSource.read, Leases.acquire, Leases.renew
    commit, discard = Unit.commit, Unit.discard
    known: dict[Any, str] = {}
    """The messages of deliveries; one that comes again in this process was not read again."""
    sent: set[int] = set()

    def subjects_of(unit: Any) -> list[str]:
        return [known[item] for acks in unit._acks for item in acks.deliveries if item in known]

    def reading(self: Any, limit: int, timeout: float) -> Any:
        number = recorder.begin("read")
        messages = read(self, limit, timeout)
        found: dict[str, list[str]] = defaultdict(list)
        for message in messages:
            delivery = message.acking.token
            if delivery not in known:
                known[delivery] = message.identity
                found[message.identity].append(f"entry {delivery.id.decode()}")
        recorder.end(number, found)
        return messages

    def leasing(self: Any, keys: Any, terms: Any) -> Any:
        names = [_identity(key) for key in keys]
        number = recorder.begin("lease", names)
        try:
            states = acquire(self, keys, terms)
        except BaseException:
            recorder.end(number, {name: ["lost"] for name in names})
            raise
        given = zip(names, states, strict=True)
        recorder.end(number, {name: [state.value] for name, state in given})
        return states

    def renewing(self: Any) -> Any:
        names = [_identity(key) for key in self._values]
        number = recorder.begin("renew", names)
        again = renew(self)
        connection = self._unit._connection
        is_lost = connection is None or connection._is_lost
        recorder.end(number, {n: ["lost" if is_lost else "kept"] for n in names if again})
        return again

    def committing(self: Any) -> Any:
        names = subjects_of(self)
        sent.add(id(self))
        number = recorder.begin("exec", names)
        result = "not applied"
        try:
            commit(self)
            result = "applied"
        except UnknownOutcome:
            result = "unknown"
            raise
        finally:
            recorder.end(number, {name: [result] for name in names})

    def discarding(self: Any) -> Any:
        names = [] if id(self) in sent else subjects_of(self)
        number = recorder.begin("discard", names)
        discard(self)
        recorder.end(number, {name: ["done"] for name in names})

    StreamSource.read, Leases.acquire, Leases.renew = reading, leasing, renewing  # type: ignore
    Unit.commit, Unit.discard = committing, discarding  # type: ignore[method-assign]


def _identity(key: bytes) -> str:
    """Return the message of an inbox key: `conquiet:inbox:{tag}:subscriber/handler:identity`."""
    return key.decode().partition("}:")[2].partition(":")[2]


def _wrap_claims(recorder: Recorder) -> None:
    claim, settle = PsycopgClaimer.claim, Claimer.settle

    def claiming(self: Any, *given: Any) -> Any:
        number = recorder.begin("claim")
        opened = claim(self, *given)
        found: dict[str, list[str]] = defaultdict(list)
        for row in opened.rows if opened is not None else ():
            found[row.key].append(str(row.id))
        recorder.end(number, {key: [f"rows {' '.join(ids)}"] for key, ids in found.items()})
        return opened

    def settling(self: Any, opened: Any, *given: Any) -> Any:
        keys = {row.key for row in opened.rows}
        number = recorder.begin("settle", keys)
        result = "lost"
        try:
            unmarked = settle(self, opened, *given)
            result = "committed"
            return unmarked
        finally:
            recorder.end(number, {key: [result] for key in keys})

    PsycopgClaimer.claim = claiming  # type: ignore[method-assign]
    Claimer.settle = settling  # type: ignore[method-assign]


class RecordedSink:
    """A sink that records which rows of an outbox it was given, and what became of them."""

    def __init__(self, sink: Any, path: Path) -> None:
        self._sink = sink
        self._recorder = Recorder(path)
        self._recorder._number = 1 << 30  # beside those of the claims
        self.keeps_order = getattr(sink, "keeps_order", False)

    def publish_each(self, messages: Any) -> Any:
        number = self._recorder.begin("publish", {message.key for message in messages})
        answers = self._sink.publish_each(messages)
        found: dict[str, list[str]] = defaultdict(list)
        for message, answer in zip(messages, answers, strict=True):
            what = "confirmed" if answer is None else "failed"
            found[message.key].append(f"row {message.acking.token} {what}")
        self._recorder.end(number, found)
        return answers

    def close(self) -> None:
        self._sink.close()


# --- reading ------------------------------------------------------------------------------------


def read_calls(path: Path) -> list[Call]:
    """Join the lines of each call; `results` is missing where the process died in it."""
    calls: dict[tuple[int, int], Call] = {}
    for line in path.read_text().splitlines():
        about = json.loads(line)
        calls.setdefault((about["process"], about["number"]), {}).update(about)
    return sorted(calls.values(), key=lambda call: call["begin"])


def operations(calls: Iterable[Call], subject: str, steps: Sequence[str]) -> Iterator[Any]:
    """Yield the operations of one message or key; processes keep their ids."""
    for call in calls:
        if call["step"] not in steps:
            continue
        if "results" not in call:
            if subject in call["of"]:
                yield Operation(call["process"], call["step"], "", call["begin"], None)
            continue
        for result in call["results"].get(subject, ()):
            yield Operation(call["process"], call["step"], result, call["begin"], call["end"])


INBOX = ("read", "lease", "renew", "exec", "discard")
RELAY = ("claim", "publish", "settle")


def replay_trace(path: Path, lease: float) -> dict[str, int]:
    """Replay every message and every key of a trace; return how many operations each kind had."""
    calls = read_calls(path)
    messages = _by_subject(calls, INBOX)
    keys = _by_subject(calls, RELAY)
    return {
        "inbox": sum(replay_message(some, name, lease) for name, some in messages.items()),
        "relay": sum(replay_key(some, name) for name, some in keys.items()),
    }


def _by_subject(calls: Iterable[Call], steps: Sequence[str]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call["step"] in steps:
            for name in call.get("results", call["of"]):
                found[name].append(call)
    return found


def replay_message(calls: Sequence[Call], message: str, lease: float) -> int:
    """Replay what happened to one message; return how many operations it had.

    A process of the model holds one entry at a time: a message of which one process read two copies
    is left out.
    """
    found = list(operations(calls, message, INBOX))
    readers = [item.process for item in found if item.step == "read"]
    if not readers or len(readers) > len(set(readers)):
        return 0
    entries = _numbers(item.result for item in found if item.step == "read")
    processes = _numbers(item.process for item in found)
    begin = min(item.begin for item in found)

    def allows(label: Label, now: float) -> bool:
        is_end = label.step in ("the_lease_ends", "an_entry_is_idle")
        return not is_end or now >= begin + 0.99 * lease

    model = RedisInbox(
        workers=len(processes), entries=len(entries), crashes=len(processes), losses=0
    )
    renamed = [
        item._replace(
            process=processes[item.process],
            result=f"entry {entries[item.result]}" if item.step == "read" else item.result,
        )
        for item in found
    ]
    replay(model, renamed, allows=allows)
    return len(found)


def replay_key(calls: Sequence[Call], key: str) -> int:
    """Replay what ordered relays did with the rows of one key; return how many operations."""
    found = list(operations(calls, key, RELAY))
    for part in cut(found):
        _replay_part(part)
    return len(found)


def cut(found: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Cut a trace of one key where nothing is open, and what follows has later rows alone.

    Before a cut each relay has settled what it claimed, or does nothing any more. A model of all
    rows would try every one of them as not yet written, at each moment.
    """
    last = {item.process: number for number, item in enumerate(found)}
    ahead = [_rows(item) for item in found]
    lowest = [0] * (len(found) + 1)
    for number in reversed(range(len(found))):
        lowest[number] = min([*ahead[number], *filter(None, [lowest[number + 1]])], default=0)
    part: list[Operation] = []
    ends, highest = 0.0, 0
    busy: set[int] = set()
    for number, item in enumerate(found):
        if part and not busy and ends < item.begin and highest < lowest[number]:
            yield part
            part = []
        part.append(item)
        ends = max(ends, item.end or 0.0)
        highest = max(highest, *ahead[number], 0)
        if item.step == "settle" or last[item.process] == number:
            busy.discard(item.process)
        else:
            busy.add(item.process)
    if part:
        yield part


def _rows(item: Operation) -> list[int]:
    """Return the rows of a claim."""
    return [int(name) for name in item.result.split()[1:]] if item.step == "claim" else []


def _replay_part(found: Sequence[Operation]) -> None:
    ids = {row for item in found for row in _rows(item)}
    rows = {str(id_): str(number) for number, id_ in enumerate(sorted(ids))}
    processes = _numbers(item.process for item in found)

    def rename(words: str) -> str:
        return " ".join(rows.get(word, word) for word in words.split())

    model = OutboxClaim(
        keys="a" * len(rows),
        ordered=True,
        relays=len(processes),
        crashes=len(processes),
        losses=0,
        limit=None,
    )
    replay(
        model,
        [
            item._replace(process=processes[item.process], result=rename(item.result))
            for item in found
        ],
    )


def _numbers(names: Iterable[Any]) -> dict[Any, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}
