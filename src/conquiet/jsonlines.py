"""Read and write CloudEvents in their structured JSON format, one per line.

line ──decode──▶ in flight ──ack──▶ gone
  │               ├─nack──▶ waiting ──▶ in flight again, before later lines
  │               └─nack, permanent or max_attempts──┐
  └─undecodable, too long────────────────────────────┴──▶ dead letters

A pipe does not keep what was read from it, so lines that are not acked when the source closes go
to the dead letters too.
"""

from __future__ import annotations

import heapq
import logging
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

from conquiet.acking import Acking, Error
from conquiet.codec import from_json, to_json
from conquiet.errors import (
    Blameless,
    ConfigError,
    ConquietError,
    InvalidMessage,
    PermanentError,
    SinkUnavailable,
    handler_of,
)
from conquiet.message import Message
from conquiet.middleware.dead_letter import DeadLetter
from conquiet.sink import Sink
from conquiet.source import EndOfSource

logger = logging.getLogger("conquiet.jsonlines")

MAX_LINE_BYTES = 32 * 1024 * 1024
"""Base64 makes data a third longer; the router accepts 16 MiB of data."""

_CHUNK_BYTES = 64 * 1024
_KEPT_BYTES = 1_000
_POLL_SECONDS = 0.05
"""How often a waiting read checks for nacked messages."""


class Readable(Protocol):
    """Reads a buffered binary stream: a file opened with 'rb', a pipe, `io.BytesIO`."""

    def read1(self, size: int, /) -> bytes: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class LinesSource:
    """Reads messages from a stream of JSON lines, until its end.

    A nacked message is delivered again before later lines; after `max_attempts` deliveries it goes
    to `dead_letters` (default: stderr) with the reason, as in `DeadLetter`. So does a line that is
    not a CloudEvent, and the beginning of a line longer than `max_line_bytes`.

    >>> import io
    >>> source = LinesSource(io.BytesIO(
    ...     b'{"specversion": "1.0", "id": "1", "type": "order.placed", "source": "/shop"}\\n'))
    >>> [message] = source.read(limit=10, timeout=0)
    >>> message.type, message.ack(), source.acked
    ('order.placed', True, 1)
    """

    def __init__(
        self,
        stream: Readable,
        dead_letters: Sink | None = None,
        *,
        max_attempts: int = 3,
        max_line_bytes: int = MAX_LINE_BYTES,
        name: str = "lines",
    ) -> None:
        if max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts}: must be at least 1")
        if max_line_bytes < 1:
            raise ConfigError(f"max_line_bytes={max_line_bytes}: must be at least 1")
        self.acked = 0
        self.dead_by_handler: Counter[str] = Counter()
        """Dead letters by the handler that failed last; `""` for what reached none."""
        self.unhandled = 0
        """How many of the dead lines were unsettled when the source was closed."""
        self._name = name
        self._max_attempts = max_attempts
        self._dead_letters: Sink = dead_letters or LinesSink(sys.stderr.buffer)
        self._lines = _Lines(stream, max_line_bytes)
        self._changed = threading.Condition()
        self._out: dict[int, _Line] = {}
        self._waiting: list[_Line] = []
        self._closed = False

    @property
    def dead(self) -> int:
        """Return how many lines became dead letters."""
        return self.dead_by_handler.total()

    @property
    def ended(self) -> bool:
        """Return whether the end of the stream was reached."""
        return self._lines.ended

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        while True:
            messages = self._take(limit)
            left = max(deadline - time.monotonic(), 0.0)
            if messages or self._closed:
                return messages
            if not self._lines.ended:
                self._lines.fill(min(left, _POLL_SECONDS))
            else:
                with self._changed:
                    if not self._out and not self._waiting and not self._lines.ready:
                        raise EndOfSource(f"{self._name} has ended")
                    if not self._waiting and not self._lines.ready:
                        self._changed.wait(left)
            if left <= 0 and not self._waiting and not self._lines.ready:
                return ()

    def _take(self, limit: int) -> list[Message[Any]]:
        messages: list[Message[Any]] = []
        with self._changed:
            while self._waiting and len(messages) < limit and not self._closed:
                messages.append(self._deliver(heapq.heappop(self._waiting)))
        while self._lines.ready and len(messages) < limit and not self._closed:
            line = self._lines.ready.popleft()
            try:
                line.message = self._decode(line)
            except InvalidMessage as error:
                self._bury([(line, InvalidMessage(f"line {line.number}: {error}"))])
                continue
            with self._changed:
                messages.append(self._deliver(line))
        return messages

    def _decode(self, line: _Line) -> Message[Any]:
        if line.cut:
            raise InvalidMessage(
                f"{line.length:,} bytes; at most {self._lines.max_bytes:,} are accepted:"
                " raise max_line_bytes, or send a reference to the data instead"
            )
        return from_json(line.text)

    def _deliver(self, line: _Line) -> Message[Any]:
        line.deliveries += 1
        if line.message is None or line.message.acking is not None:
            line.message = self._decode(line)  # again: a handler may have changed the former one
        line.message.deliveries = line.deliveries
        line.message.acking = Acking(self, line)
        self._out[line.number] = line
        return line.message

    def settle(self, acked: Sequence[_Line], nacked: Sequence[tuple[_Line, Error]]) -> None:
        hopeless: list[tuple[_Line, Exception]] = []
        with self._changed:
            for line in acked:
                if self._out.pop(line.number, None) is not None:
                    self.acked += 1
            for line, error in nacked:
                if line.number not in self._out:
                    continue  # the source was closed since
                if isinstance(error, Blameless):
                    line.deliveries -= 1
                elif isinstance(error, PermanentError) or line.deliveries >= self._max_attempts:
                    hopeless.append((line, error or ConquietError("nacked without a reason")))
                    continue
                heapq.heappush(self._waiting, self._out.pop(line.number))
            self._changed.notify_all()
        if hopeless:
            self._bury(hopeless)
            with self._changed:  # only now may the source end
                for line, _ in hopeless:
                    self._out.pop(line.number, None)
                self._changed.notify_all()

    def _bury(self, dead: Sequence[tuple[_Line, Exception]]) -> None:
        messages = [self._original(line) for line, _ in dead]
        errors = [error for _, error in dead]
        bury = DeadLetter(self._dead_letters, max_attempts=1)(lambda batch: errors)
        for (line, _), result in zip(dead, bury(messages), strict=True):
            if isinstance(result, Exception):  # no dead letter: keep it in the log
                logger.error("line %d of %s was lost: %r", line.number, self._name, line.text)
        with self._changed:
            self.dead_by_handler.update(handler_of(error) for _, error in dead)

    def _original(self, line: _Line) -> Message[Any]:
        """Return the original message, or a substitute that holds the line."""
        try:
            message = self._decode(line)
        except InvalidMessage:
            attributes = {"source": self._name, "subject": f"line {line.number}"}
            return Message(line.text, {**attributes, "datacontenttype": "text/plain"})
        message.deliveries = max(line.deliveries, 1)
        message.handler = line.message.handler if line.message is not None else None
        return message

    def close(self) -> None:
        """Close the source; unsettled lines go to the dead letters."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left = [*self._out.values(), *self._waiting]
            self._out.clear()
            self._waiting.clear()
            self._changed.notify_all()
        left = [*sorted(left), *self._lines.close()]
        self.unhandled = len(left)
        reason = "was read and not handled: the worker stopped"
        if left:
            self._bury([(line, ConquietError(f"line {line.number} {reason}")) for line in left])


class LinesSink(Sink):
    """Writes messages to a stream as JSON lines, flushed after each batch.

    A stream has no topics: all messages are written to it. `on_closed` is called when the reader
    of a pipe has closed it, after which nothing can be published any more.
    """

    def __init__(self, stream: BinaryIO, on_closed: Callable[[], object] | None = None) -> None:
        self.on_closed = on_closed
        self._stream = stream
        self._lock = threading.Lock()
        self._torn = False

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        lines: list[bytes] = []
        answers: list[Error] = []
        for message in messages:
            try:
                lines.append(to_json(message))
                answers.append(None)
            except ConquietError as error:
                answers.append(error)
        if lines:
            with self._lock:
                self._write(b"\n".join([*lines, b""]))
        return answers

    def _write(self, text: bytes) -> None:
        try:
            # A failed write may have left half a line.
            self._stream.write(b"\n" + text if self._torn else text)
            self._stream.flush()
            self._torn = False
        except (OSError, ValueError) as error:
            self._torn = True
            if self.on_closed is not None and isinstance(error, (BrokenPipeError, ValueError)):
                self.on_closed()
            raise SinkUnavailable(f"could not write the lines: {error}") from error

    def close(self) -> None:
        """Do nothing: every batch was flushed, and the caller owns the stream."""


class _Line:
    """Holds one line and its state."""

    __slots__ = ("cut", "deliveries", "length", "message", "number", "text")

    def __init__(self, number: int, text: bytes, length: int, cut: bool) -> None:
        self.number = number
        self.text = text
        self.length = length
        self.cut = cut  # too long: text is its beginning
        self.deliveries = 0
        self.message: Message[Any] | None = None

    def __lt__(self, other: _Line) -> bool:
        return self.number < other.number


class _Lines:
    """Splits a stream into lines without blocking, keeping at most one long line."""

    def __init__(self, stream: Readable, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.ready: deque[_Line] = deque()
        self.ended = False
        self._stream = stream
        self._number = 0
        self._pieces: list[bytes] = []
        self._length = 0
        self._cut = False
        self._poll: select.poll | None = None
        try:
            descriptor = stream.fileno()
        except OSError:  # io.BytesIO and the like are always ready
            return
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def fill(self, timeout: float) -> None:
        """Read what is available; wait for it up to `timeout` seconds."""
        if self._poll is not None and not self._poll.poll(timeout * 1000):
            return
        chunk = self._stream.read1(_CHUNK_BYTES)
        if not chunk:
            self._end_line()
            self.ended = True
            return
        *complete, rest = chunk.split(b"\n")
        for piece in complete:
            self._add(piece)
            self._end_line()
        self._add(rest)

    def _add(self, piece: bytes) -> None:
        self._length += len(piece)
        if not self._cut:
            self._pieces.append(piece)
        if self._length > self.max_bytes and not self._cut:
            self._pieces = [b"".join(self._pieces)[:_KEPT_BYTES]]
            self._cut = True

    def _end_line(self) -> None:
        text = b"".join(self._pieces)
        self._number += 1
        if text.strip():
            self.ready.append(_Line(self._number, text, self._length, self._cut))
        self._pieces, self._length, self._cut = [], 0, False

    def close(self) -> list[_Line]:
        """Return the lines that were not delivered."""
        if self._pieces:
            self._end_line()
        left = list(self.ready)
        self.ready.clear()
        return left
