"""JSON lines: nothing is lost, whatever stands in them and whatever becomes of it."""

from __future__ import annotations

import io
import os
import threading
from typing import Any

import pytest

from conquiet import Message, Router, Worker
from conquiet.codec import from_json, to_json
from conquiet.errors import ConfigError, GivenBack, InvalidMessage, SinkUnavailable, StoreError
from conquiet.jsonlines import LinesSink, LinesSource
from conquiet.middleware import replay
from conquiet.source import EndOfSource


def event(number: int, **more: Any) -> Message[Any]:
    attributes = {"id": str(number), "type": "greet", "source": "/test", **more}
    return Message(b'{"name": "Ada"}', attributes)


def lines(*events: Message[Any] | bytes) -> bytes:
    return b"".join((e if isinstance(e, bytes) else to_json(e)) + b"\n" for e in events)


class Graveyard:
    """A stream for dead letters, and what stands in it."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        self.sink = LinesSink(self.stream)

    @property
    def letters(self) -> list[Message[Any]]:
        return [from_json(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def grave() -> Graveyard:
    return Graveyard()


def source_of(content: bytes, grave: Graveyard, **settings: Any) -> LinesSource:
    return LinesSource(io.BytesIO(content), grave.sink, **settings)


def read_all(source: LinesSource) -> list[Message[Any]]:
    found: list[Message[Any]] = []
    try:
        while (batch := source.read(2, 0)) or not source.ended:
            found.extend(batch)
    except EndOfSource:
        pass
    return found


def test_reads_messages_in_order_and_ends_when_all_are_settled(grave):
    source = source_of(lines(*map(event, range(5))), grave)
    messages = read_all(source)
    assert [message.id for message in messages] == ["0", "1", "2", "3", "4"]
    assert source.read(1, 0) == ()
    for message in messages:
        message.ack()
    with pytest.raises(EndOfSource):
        source.read(1, 0)
    assert source.acked == 5
    assert grave.letters == []


def test_what_the_sink_writes_the_source_reads_back_byte_for_byte(grave):
    stream = io.BytesIO()
    sent = [
        Message(b'{"a":  1}', {"id": "1", "type": "t", "source": "/s"}),
        Message(b"\x00\xff\n", {"id": "2", "type": "t", "source": "/s", "datacontenttype": "x/y"}),
        Message("grüß\n".encode(), {"id": "3", "type": "t", "source": "/s", "subject": "k"}),
    ]
    sent[2].attributes["datacontenttype"] = "text/plain"
    assert LinesSink(stream).publish_each(sent) == [None, None, None]
    received = source_of(stream.getvalue(), grave).read(10, 0)
    assert [message.data for message in received] == [message.data for message in sent]
    assert received[2].subject == "k"


def test_a_last_line_without_line_break_counts_and_blank_lines_do_not(grave):
    source = source_of(b"\n \r\n" + lines(event(1)) + b"\n" + to_json(event(2)), grave)
    assert [message.id for message in read_all(source)] == ["1", "2"]
    assert grave.letters == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"nonsense", "not a CloudEvents JSON object"),
        (b"[1, 2]", "not a CloudEvents JSON object"),
        (b'{"id": "1"}', "attribute 'source'"),
        (b'{"specversion": "0.3", "id": "1", "source": "/s", "type": "t"}', "specversion"),
        (b"\xff\xfe\x00", "not a CloudEvents JSON object"),
    ],
)
def test_an_undecodable_line_goes_to_the_dead_letters_with_its_number(grave, line, reason):
    source = source_of(lines(event(1), line, event(3)), grave)
    assert [message.id for message in read_all(source)] == ["1", "3"]
    [letter] = grave.letters
    assert letter.attributes["deadreason"].startswith("InvalidMessage: line 2: ")
    assert reason in letter.attributes["deadreason"]
    assert replay(letter).data == line
    assert source.dead == 1


def test_a_line_beyond_the_limit_is_skipped_without_being_kept(grave):
    long = to_json(Message(b'"' + b"x" * 500_000 + b'"', event(2).attributes))
    source = source_of(lines(event(1), long, event(3)), grave, max_line_bytes=100_000)
    assert [message.id for message in read_all(source)] == ["1", "3"]
    [letter] = grave.letters
    assert f"line 2: {len(long):,} bytes; at most 100,000" in letter.attributes["deadreason"]
    assert long.startswith(replay(letter).data)
    assert len(replay(letter).data) == 1_000


def test_a_line_of_exactly_the_limit_is_taken(grave):
    line = to_json(event(1))
    source = source_of(lines(line, line), grave, max_line_bytes=len(line))
    assert len(read_all(source)) == 2


def test_a_line_longer_than_a_chunk_arrives_whole(grave):
    data = b'"' + b"x" * 300_000 + b'"'
    source = source_of(lines(Message(data, event(1).attributes), event(2)), grave)
    first, second = read_all(source)
    assert first.data == data
    assert second.id == "2"


def test_a_nacked_message_comes_again_before_later_lines_and_then_goes_to_the_dead_letters(grave):
    source = source_of(lines(event(1), event(2)), grave, max_attempts=3)
    for delivery in (1, 2, 3):
        [message] = source.read(1, 0)
        assert (message.id, message.deliveries) == ("1", delivery)
        message.nack(ValueError(f"no {delivery}"))
    [letter] = grave.letters
    assert letter.attributes["deadreason"] == "ValueError: no 3"
    assert letter.attributes["deadattempts"] == "3"
    assert replay(letter).attributes == {**event(1).attributes, "specversion": "1.0"}
    assert [message.id for message in source.read(5, 0)] == ["2"]


def test_a_changed_message_comes_again_as_it_was(grave):
    source = source_of(lines(event(1)), grave)
    [message] = source.read(1, 0)
    message.attributes["type"] = "changed"
    message.nack(ValueError())
    [message] = source.read(1, 0)
    assert message.type == "greet"


def test_a_permanent_error_goes_to_the_dead_letters_at_once(grave):
    source = source_of(lines(event(1)), grave)
    [message] = source.read(1, 0)
    message.nack(InvalidMessage("does not fit"))
    assert [letter.id for letter in grave.letters] == ["1"]


def test_nack_without_error_is_a_nack(grave):
    source = source_of(lines(event(1)), grave, max_attempts=1)
    [message] = source.read(1, 0)
    message.nack(None)
    [letter] = grave.letters
    assert "nacked without a reason" in letter.attributes["deadreason"]


@pytest.mark.parametrize("error", [StoreError("away"), GivenBack("the worker stops")])
def test_a_blameless_failure_costs_no_try(grave, error):
    source = source_of(lines(event(1)), grave, max_attempts=1)
    for _ in range(5):
        [message] = source.read(1, 0)
        assert message.deliveries == 1
        message.nack(error)
    assert grave.letters == []


def test_what_was_read_and_not_settled_at_the_close_goes_to_the_dead_letters(grave):
    source = source_of(lines(*map(event, range(4))) + b'{"half', grave)
    first, second, _ = source.read(3, 0)
    first.ack()
    second.nack(ValueError())
    source.close()
    source.close()
    *whole, half = grave.letters
    assert [letter.id for letter in whole] == ["1", "2", "3"]
    assert half.data == b'{"half'
    reasons = {letter.attributes["deadreason"].partition(" was ")[2] for letter in grave.letters}
    assert reasons == {"read and not handled: the worker stopped"}
    assert source.unhandled == 4


def test_a_settlement_after_the_close_changes_nothing(grave):
    source = source_of(lines(event(1)), grave)
    [message] = source.read(3, 0)
    source.close()
    message.ack()
    assert source.acked == 0
    assert source.read(1, 0) == []


def test_dead_letters_that_cannot_be_written_are_in_the_log(caplog):
    class Full(LinesSink):
        def publish_each(self, messages):
            raise SinkUnavailable("disk full")

    source = LinesSource(io.BytesIO(lines(b"nonsense")), Full(io.BytesIO()), name="stdin:")
    assert read_all(source) == []
    assert "line 1 of stdin: was lost: b'nonsense'" in caplog.text


def test_a_pipe_is_waited_for_but_not_longer_than_allowed(grave):
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as pipe:
        source = LinesSource(stream, grave.sink)
        assert source.read(10, 0.01) == ()
        pipe.write(lines(event(1)) + b'{"specversion": "1.0", ')
        [message] = source.read(10, 10)
        message.ack()
        writer = threading.Timer(0.05, pipe.write, [b'"id": "2", "type": "t", "source": "/s"}\n'])
        writer.start()
        [message] = source.read(10, 10)
        assert message.id == "2"
        writer.join()


def test_a_nack_wakes_a_read_that_waits_for_the_pipe(grave):
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as pipe:
        source = LinesSource(stream, grave.sink)
        pipe.write(lines(event(1)))
        [message] = source.read(10, 10)
        nack = threading.Timer(0.05, message.nack)
        nack.start()
        [again] = source.read(10, 10)
        assert (again.id, again.deliveries) == ("1", 2)
        nack.join()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_worker_handles_every_line_and_ends_by_itself(grave, threads):
    router = Router()
    seen: list[str] = []

    @router.raw()
    def handle(message: Message[bytes]) -> None:
        seen.append(message.id)
        if message.id == "7":
            raise ValueError("seven")

    source = source_of(lines(*map(event, range(500))), grave, max_attempts=2)
    assert Worker(source, router, threads=threads, batch_size=20).run()
    assert sorted(map(int, set(seen))) == list(range(500))
    assert (source.acked, source.dead, seen.count("7")) == (499, 1, 2)
    assert [letter.attributes["deadhandler"] for letter in grave.letters] == ["handle"]


def test_the_sink_refuses_a_message_alone_and_writes_its_neighbours():
    stream = io.BytesIO()
    bad = Message(b"{}", {"id": "2", "type": "t"})
    first, second, third = LinesSink(stream).publish_each([event(1), bad, event(3)])
    assert (first, third) == (None, None)
    assert isinstance(second, InvalidMessage)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_torn_line_does_not_spoil_the_next():
    class Failing(io.BytesIO):
        fails = True

        def write(self, text):
            if self.fails:
                super().write(text[:10])
                raise OSError("no space left")
            return super().write(text)

    stream = Failing()
    sink = LinesSink(stream)
    with pytest.raises(SinkUnavailable, match="no space left"):
        sink.publish([event(1)])
    stream.fails = False
    assert sink.publish_each([event(1)]) == [None]
    assert from_json(stream.getvalue().splitlines()[-1]).id == "1"


def test_a_reader_that_went_away_is_told_once_per_publish():
    reading, writing = os.pipe()
    os.close(reading)
    gone: list[bool] = []
    with open(writing, "wb", buffering=0) as stream, pytest.raises(SinkUnavailable):
        LinesSink(stream, on_closed=lambda: gone.append(True)).publish([event(1)])
    assert gone == [True]


@pytest.mark.parametrize("settings", [{"max_attempts": 0}, {"max_line_bytes": 0}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match="at least"):
        LinesSource(io.BytesIO(), **settings)


def test_a_message_that_is_dead_for_one_handler_comes_back_for_the_other(grave):
    router, shipped = Router(), []

    @router.raw()
    def bill(message: Message) -> None:
        raise InvalidMessage("never")

    @router.raw()
    def ship(message: Message) -> None:
        if message.deliveries == 1:
            raise ConnectionError("no truck")
        shipped.append(message.id)

    Worker(source_of(lines(event(1)), grave), router).run()
    assert shipped == ["1"]
    assert [letter.attributes["deadattempts"] for letter in grave.letters] == ["2"]
