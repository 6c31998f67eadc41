"""Hopeless messages are put aside whole, with the reason, and can be replayed."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.middleware.routers import Order, atomic, nothing, order, router_of

from conquiet import Acking, Message
from conquiet.codec import from_json, to_json
from conquiet.errors import (
    ConfigError,
    ConquietError,
    GivenBack,
    InvalidMessage,
    PermanentError,
    SinkUnavailable,
    StoreError,
)
from conquiet.memory import Log
from conquiet.middleware import DeadLetter, Retry, replay
from conquiet.middleware.dead_letter import MAX_REASON_CHARS
from conquiet.testing import deliver, message


class Letters:
    """A sink that keeps what it confirms; tell it to refuse, or to be out of reach."""

    def __init__(self):
        self.messages = []
        self.refuses = lambda letter: None
        self.unavailable = None

    def publish_each(self, messages):
        if self.unavailable is not None:
            raise self.unavailable
        answers = [self.refuses(letter) for letter in messages]
        self.messages += [m for m, answer in zip(messages, answers, strict=True) if answer is None]
        return answers

    def close(self):
        pass


@pytest.fixture
def letters():
    return Letters()


def failing(error):
    def handle(message):
        raise error

    return handle


def died(original, error=None, **options):
    """The dead letter that a message becomes."""
    letters = Letters()
    router = router_of(failing(error or PermanentError("no")), DeadLetter(letters, **options))
    assert deliver(router, original).acked
    [letter] = letters.messages
    return letter


# --- when -----------------------------------------------------------------------------------


def test_a_permanent_error_goes_at_once(letters):
    router = router_of(failing(PermanentError("no")), DeadLetter(letters))
    assert deliver(router, order()).acked
    assert [letter.id for letter in letters.messages] == ["1"]


@pytest.mark.parametrize(("deliveries", "dies"), [(1, False), (2, False), (3, True), (4, True)])
def test_any_other_error_goes_after_its_deliveries(letters, deliveries, dies):
    router = router_of(failing(ValueError("no")), DeadLetter(letters, max_attempts=3))
    original = order()
    original.deliveries = deliveries
    delivered = deliver(router, original)
    assert bool(letters.messages) == bool(delivered.acked) == dies


@pytest.mark.parametrize("error", [GivenBack("x"), StoreError("x"), SinkUnavailable("x")])
def test_what_is_not_its_fault_never_kills_a_message(letters, error):
    router = router_of(failing(error), DeadLetter(letters, max_attempts=1))
    original = order()
    original.deliveries = 100
    assert deliver(router, original).nacked
    assert not letters.messages


def test_a_success_is_left_alone(letters):
    assert deliver(router_of(nothing, DeadLetter(letters, max_attempts=1)), order()).acked
    assert not letters.messages


def test_in_a_batch_only_the_hopeless_go_and_in_one_call(letters):
    def handle(message):
        if int(message.id) % 2:
            raise PermanentError(message.id)
        if message.id == "4":
            raise ValueError

    router = router_of(handle, DeadLetter(letters))
    delivered = deliver(router, *(order(number) for number in range(1, 6)))
    assert [letter.id for letter in letters.messages] == ["1", "3", "5"]
    assert [m.id for m in delivered.nacked] == ["4"]


def test_a_message_that_nobody_could_read_goes_at_once(letters):
    router = router_of(nothing, DeadLetter(letters))
    deliver(router, message(b"{}", type=None))
    assert "InvalidMessage" in letters.messages[0].attributes["deadreason"]


def test_data_that_does_not_fit_goes_at_once_with_its_bytes(letters):
    from conquiet import Router

    router = Router()
    router.use(DeadLetter(letters))

    @router.event()
    def handle(order: Order) -> None: ...

    deliver(router, message(b"\xff not json", type="order"))
    assert letters.messages[0].data == b"\xff not json"


def test_what_the_chain_raises_counts_for_each(letters):
    def broken(batch):
        raise PermanentError

    assert DeadLetter(letters)(broken)([order(1), order(2)]) == [(), ()]
    assert len(letters.messages) == 2


def test_in_an_ordered_worker_the_key_waits_and_goes_on_afterwards(letters):
    def handle(message):
        if message.id == "1":
            raise PermanentError

    router = router_of(handle, DeadLetter(letters))
    delivered = deliver(router, order(1, key="a"), order(2, key="a"))
    assert [m.id for m in delivered.acked] == ["1"]
    assert isinstance(delivered.errors[0], GivenBack)
    assert deliver(router, *delivered.nacked).acked


# --- what is in it --------------------------------------------------------------------------


def test_it_says_what_became_of_the_message():
    original = order(7, subject="a")
    original.deliveries = 4
    original.topic = "commands"
    letter = died(original)
    assert letter.topic == "dead-letters"
    assert letter.attributes["deadreason"] == "PermanentError: no"
    assert letter.attributes["deadhandler"] == "handle"
    assert letter.attributes["deadattempts"] == "4"
    assert letter.attributes["deadtopic"] == "commands"
    assert letter.attributes["deadtime"].endswith("Z")
    assert "in handle" in letter.attributes["deadtraceback"]
    assert letter.id == "7"
    assert letter.subject == "a"
    assert letter.data == original.data


def test_it_is_a_valid_cloud_event():
    original = order(note="two\nlines", count=5)
    original.attributes["Wrong Name"] = "x"
    letter = died(original, InvalidMessage("several\nlines \udc80 \x00"))
    assert from_json(to_json(letter)).attributes == letter.attributes


def test_reason_and_traceback_are_bounded():
    letter = died(order(), PermanentError("x" * 100_000), max_traceback_chars=200)
    assert len(letter.attributes["deadreason"]) == MAX_REASON_CHARS
    assert len(letter.attributes["deadtraceback"]) <= 210
    assert letter.attributes["deadtraceback"].endswith("x\\n")


def test_without_traceback():
    assert "deadtraceback" not in died(order(), max_traceback_chars=0).attributes


def test_an_error_that_cannot_be_printed_kills_no_worker():
    class Unprintable(PermanentError):
        def __str__(self):
            raise RuntimeError

    assert "cannot be printed" in died(order(), Unprintable()).attributes["deadreason"]


def test_the_log_says_it(caplog):
    with caplog.at_level(logging.ERROR):
        died(order(7))
    assert "dead letter handler=handle delivery=1: order id=7" in caplog.text


# --- replay ---------------------------------------------------------------------------------


def through_a_log(letter):
    """Publish and read again, as a real dead letter is."""
    log = Log()
    assert log.sink().publish_each([letter]) == [None]
    [read] = log.source("replay").read(10, 0)
    return read


def test_replay_restores_the_original():
    original = order(7, subject="a", correlationid="c", traceparent="00-x")
    original.topic = "commands"
    again = replay(through_a_log(died(original)))
    assert again.data == original.data
    assert again.attributes == original.attributes
    assert again.topic == "commands"
    assert again.deliveries == 1


names = st.one_of(
    st.sampled_from(["id", "type", "source", "data", "deadreason", "deadtopic", "deadattributes"]),
    st.text(max_size=8),
)
nested = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(st.characters(codec=None), max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
values = st.one_of(nested, st.binary(max_size=8))


@given(st.binary(), st.dictionaries(names, values, max_size=6), st.sampled_from([None, "orders"]))
@example(b"", {"id": "\udc80", "type": 5, "deadtopic": "other"}, None)
@example(b"{}", {"id": "1", "type": "t", "source": "s", "time": b"\x00"}, "orders")
def test_replay_restores_whatever_attributes_there_were(data, attributes, topic):
    original = Message(data, dict(attributes), topic=topic)
    letters = Letters()
    broken = DeadLetter(letters)(lambda batch: [PermanentError("no")] * len(batch))
    assert broken([original]) == [()]
    [letter] = letters.messages
    read = from_json(to_json(letter))  # valid, whatever the original was
    again = replay(read)
    assert again.attributes == attributes
    assert [type(value) for value in again.attributes.values()] == [
        type(value) for value in attributes.values()
    ]
    assert again.topic == topic
    assert replay(letter).data == data


def test_a_dead_letter_that_dies_can_be_replayed_twice():
    original = order(7)
    original.topic = "commands"
    once = died(original)
    twice = died(Message(once.data, once.attributes, topic=once.topic))
    again = replay(replay(twice))
    assert again.attributes == original.attributes
    assert again.topic == "commands"


def test_a_value_that_no_source_could_give_is_kept_as_text():
    original = order(strange={1, 2})
    letters = Letters()
    DeadLetter(letters)(lambda _: [PermanentError("no")])([original])
    assert replay(letters.messages[0]).attributes["strange"] == "{1, 2}"


@pytest.mark.parametrize(
    ("data", "written"),
    [
        (Order(7), b'{"id":7}'),
        (None, None),
        (bytearray(b"x"), b"x"),
        (object, b"<class 'object'>"),
    ],
)
def test_typed_data_is_written_as_it_would_be_sent(data, written):
    letters = Letters()
    original = Message(data, {"datacontenttype": 5} if data is object else {})
    DeadLetter(letters)(lambda _: [PermanentError("no")])([original])
    assert letters.messages[0].data == written


def test_typed_data_with_broken_attributes_is_written_as_json():
    letters = Letters()
    DeadLetter(letters)(lambda _: [PermanentError("no")])(
        [Message(Order(7), {"datacontenttype": 5})]
    )
    assert json.loads(letters.messages[0].data) == {"id": 7}


def test_what_is_no_dead_letter_is_not_replayed():
    with pytest.raises(InvalidMessage, match="not a dead letter"):
        replay(order())


@pytest.mark.parametrize("damage", ["no json", "[1]", '[["a", "bytes", "?"]]', "7"])
def test_a_damaged_dead_letter_is_not_replayed(damage):
    letter = order(deadreason="x", deadattributes=damage)
    with pytest.raises(InvalidMessage, match="damaged"):
        replay(letter)


# --- never lost -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SinkUnavailable("down"), OSError("broken"), ValueError("bug")])
def test_when_the_sink_is_out_of_reach_the_message_is_nacked(letters, error, caplog):
    letters.unavailable = error
    router = router_of(failing(PermanentError("no")), DeadLetter(letters))
    delivered = deliver(router, order())
    assert isinstance(delivered.errors[0], PermanentError)
    assert "could not publish" in caplog.text
    letters.unavailable = None
    assert deliver(router, *delivered.nacked).acked


def test_when_the_sink_refuses_one_that_one_is_nacked(letters):
    letters.refuses = lambda letter: ValueError("too large") if letter.id == "2" else None
    router = router_of(failing(PermanentError("no")), DeadLetter(letters))
    delivered = deliver(router, order(1), order(2), order(3))
    assert [m.id for m in delivered.acked] == ["1", "3"]
    assert [m.id for m in delivered.nacked] == ["2"]


def test_a_sink_that_answers_too_little_confirms_nothing(letters):
    letters.publish_each = lambda messages: []
    router = router_of(failing(PermanentError("no")), DeadLetter(letters))
    assert deliver(router, order()).nacked


def test_it_is_published_before_the_ack():
    steps = []

    class Recording(Letters):
        def publish_each(self, messages):
            steps.append("publish")
            return [None]

    class Source:
        def settle(self, acked, nacked):
            steps.append("ack")

    original = order()
    original.acking = Acking(Source())
    router_of(failing(PermanentError("no")), DeadLetter(Recording())).process([original])
    assert steps == ["publish", "ack"]


@pytest.mark.parametrize("strategy", ["on_success", "manual", "forward"])
def test_it_is_acked_whatever_the_strategy(letters, strategy):
    router = router_of(failing(PermanentError("no")), DeadLetter(letters), ack=strategy)
    assert deliver(router, order()).acked


def test_a_source_that_cannot_take_the_ack_delivers_again_and_nothing_breaks(letters, caplog):
    class Source:
        def settle(self, acked, nacked):
            raise ConquietError("gone")

    original = order()
    original.acking = Acking(Source())
    router = router_of(failing(PermanentError("no")), DeadLetter(letters))
    assert router.process([original]) == [()]
    assert "delivered again" in caplog.text


def test_one_handler_of_several_can_die_alone(letters):
    router = router_of(failing(PermanentError("no")), DeadLetter(letters))

    @router.raw(type="order", name="other")
    def other(order: Message) -> None: ...

    assert deliver(router, order()).acked
    [letter] = letters.messages
    assert letter.attributes["deadhandler"] == "handle"


# --- its place ------------------------------------------------------------------------------


def test_the_transaction_is_rolled_back_and_the_letter_is_written(letters):
    chain, store = atomic(outside=(DeadLetter(letters),))

    def handle(message):
        store.put("seen", message.id)
        raise PermanentError("no")

    assert deliver(router_of(handle, *chain), order()).acked
    assert store.get("seen") is None
    assert len(letters.messages) == 1


def test_retry_comes_first(letters):
    tries = []

    def handle(message):
        tries.append(message.id)
        raise ValueError

    router = router_of(handle, DeadLetter(letters, max_attempts=1), Retry(3, first=0))
    assert deliver(router, order()).acked
    assert len(tries) == 3


def test_inside_a_transaction_it_is_refused(letters):
    chain, _ = atomic(DeadLetter(letters))
    with pytest.raises(ConfigError, match=r"DeadLetter, Transaction, Inbox, Outbox\)"):
        router_of(nothing, *chain).start()


@pytest.mark.parametrize(
    "options", [{"max_attempts": 0}, {"topic": ""}, {"max_traceback_chars": -1}]
)
def test_it_refuses_settings_that_make_no_sense(letters, options):
    with pytest.raises(ConfigError, match=r"DeadLetter\("):
        DeadLetter(letters, **options)
