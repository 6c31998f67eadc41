"""Publish messages that cannot be handled as dead letters, with the reason.

A dead letter is the original message, its data byte for byte, plus attributes about the failure.
`replay` removes those again.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conquiet import attempts, bridge
from conquiet.acking import settle_after_commit
from conquiet.codec import encode_data
from conquiet.errors import (
    Blameless,
    ConfigError,
    ConquietError,
    InvalidMessage,
    PermanentError,
    TryLater,
)
from conquiet.handler import NOTHING, Process, Result
from conquiet.message import Attributes, Message, describe, new_id, now_text, printable
from conquiet.sink import Sink
from conquiet.stage import Stage

logger = logging.getLogger("conquiet.middleware")

REASON = "deadreason"
HANDLER = "deadhandler"
ATTEMPTS = "deadattempts"
TRACEBACK = "deadtraceback"
TIME = "deadtime"
TOPIC = "deadtopic"
ERRORS = "deaderrors"
"""The errors of all attempts as JSON, if there was an earlier one (`conquiet.attempts`)."""
ATTRIBUTES = "deadattributes"
STREAM, ENTRY = "deadstream", "deadentry"
"""Where a dead letter of a Redis stream came from; its source adds them."""
_NAMES = frozenset((REASON, HANDLER, ATTEMPTS, TRACEBACK, TIME, TOPIC, ERRORS, ATTRIBUTES))

IS_DEAD = "conquiet.dead"
"""Set in a message's locals when it was published as a dead letter."""

MAX_REASON_CHARS = 1_000
MAX_TRACEBACK_CHARS = 4_000

_name = re.compile(r"[a-z0-9]+")
_unprintable = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_stand_ins = {"type": "conquiet.dead.letter", "source": "conquiet:unknown"}


class DeadLetter:
    """Publishes failed messages to a sink, and acks them when the sink has confirmed.

    A message with a `PermanentError` is dead at once; with any other error after `max_attempts`
    deliveries; with a `Blameless` one, or while `Retry(delays=…)` tries it again later, never. A
    message with several handlers is dead when none of those that failed can be retried. If the sink
    fails, the message is nacked, and its next delivery tries again.

    `topic` is that of dead letters in the sink; of a traceback the last `max_traceback_chars`
    characters are kept.
    """

    stage = Stage.DEAD_LETTER

    def __init__(
        self,
        sink: Sink,
        max_attempts: int = 5,
        topic: str = "dead-letters",
        *,
        max_traceback_chars: int = MAX_TRACEBACK_CHARS,
    ) -> None:
        if max_attempts < 1:
            raise ConfigError(f"DeadLetter(max_attempts={max_attempts}): must be 1 or more")
        if not topic:
            raise ConfigError("DeadLetter(topic=''): name the topic of the dead letters")
        if max_traceback_chars < 0:
            raise ConfigError(f"DeadLetter(max_traceback_chars={max_traceback_chars}): 0 or more")
        self._sink = sink
        self._max_attempts = max_attempts
        self._topic = topic
        self._max_traceback_chars = max_traceback_chars

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            try:
                results = next(batch)
            except Exception as error:  # noqa: BLE001 - an error of the chain fails the whole batch
                results = [error] * len(batch)
            failed = {
                index: result
                for index, result in enumerate(results)
                if isinstance(result, Exception)
            }
            # A message that comes back for one of its handlers comes back for all of them, so the
            # shares of it that are hopeless wait: they would be published with each delivery.
            returning = {
                id(batch[index].origin)
                for index, error in failed.items()
                if not self._is_hopeless(batch[index], error)
            }
            dead = {
                index: error
                for index, error in failed.items()
                if id(batch[index].origin) not in returning
            }
            if not dead:
                return results
            buried = self._bury([(batch[index], error) for index, error in dead.items()])
            gone = {index for index, is_in in zip(dead, buried, strict=True) if is_in}
            return [NOTHING if index in gone else result for index, result in enumerate(results)]

        return process

    def _is_hopeless(self, message: Message[Any], error: Exception) -> bool:
        if isinstance(error, (Blameless, TryLater)):
            return False
        return isinstance(error, PermanentError) or message.deliveries >= self._max_attempts

    def _bury(self, dead: Sequence[tuple[Message[Any], Exception]]) -> Sequence[bool]:
        """Publish dead letters and ack the confirmed ones; return which were confirmed."""
        try:
            answers = bridge.call(
                self._sink.publish_each,
                [
                    to_letter(message, error, self._topic, self._max_traceback_chars)
                    for message, error in dead
                ],
            )
            buried = [answer is None for answer in answers]
            if len(buried) != len(dead):
                raise ConquietError(f"{len(answers)} answers to {len(dead)} messages")
        except Exception:
            logger.exception(
                "could not publish %d dead letters; the messages are nacked", len(dead)
            )
            return [False] * len(dead)
        for (message, error), answer in zip(dead, answers, strict=True):
            _log(message, error, answer)
        _ack([message for (message, _), is_in in zip(dead, buried, strict=True) if is_in])
        return buried


def to_letter(
    message: Message[Any],
    error: Exception,
    topic: str,
    max_traceback_chars: int = MAX_TRACEBACK_CHARS,
) -> Message[Any]:
    """Return the dead letter of a message, in a form that any sink can carry."""
    attributes, is_exact = _plain(message.attributes)
    about = {
        REASON: _printable(_reason(error)[:MAX_REASON_CHARS]),
        ATTEMPTS: str(message.deliveries),
        TIME: now_text(),
    }
    if message.handler is not None:
        about[HANDLER] = _printable(message.handler.name)
    if message.topic is not None:
        about[TOPIC] = message.topic
    if message.errors:
        last = attempts.append(attempts.dump(message.errors), message.deliveries, error)
        about[ERRORS] = _printable(f"{time.time():.3f}".join(last))
    if max_traceback_chars:
        about[TRACEBACK] = _printable(_traceback(error)[-max_traceback_chars:])
    if not is_exact:
        about[ATTRIBUTES] = _pack(message.attributes)
    return Message(_data(message), {**attributes, **about}, topic=topic)


def replay(letter: Message[Any]) -> Message[Any]:
    """Restore the original message of a dead `letter`: its data, attributes and topic.

    >>> letter = Message(b"{}", {"id": "1", "deadreason": "ValueError: no", "deadtopic": "orders"})
    >>> original = replay(letter)
    >>> original.attributes, original.topic
    ({'id': '1'}, 'orders')
    """
    attributes = letter.attributes
    if REASON not in attributes:
        raise InvalidMessage(
            f"{describe(attributes)}: not a dead letter, it has no attribute {REASON!r}"
        )
    if ATTRIBUTES in attributes:
        original = _unpack(attributes[ATTRIBUTES], attributes)
    else:
        original = {name: value for name, value in attributes.items() if name not in _NAMES}
    return Message(letter.data, original, topic=attributes.get(TOPIC))


def _plain(original: Mapping[str, Any]) -> tuple[Attributes, bool]:
    """Return the attributes that any sink can carry, and whether they are complete."""
    plain = {
        name: value
        for name, value in original.items()
        if type(name) is str
        and _name.fullmatch(name)
        and name != "data"  # reserved for the data
        and name not in _NAMES  # of a dead letter that failed again
        and type(value) is str
        and not _unprintable.search(value)
    }
    is_exact = len(plain) == len(original)
    for name in ("id", "type", "source"):
        if not plain.get(name):
            plain[name] = _stand_ins.get(name) or new_id()
            is_exact = False
    return plain, is_exact


def _pack(original: Mapping[str, Any]) -> str:
    """Encode all attributes of any type in one line of text."""
    return json.dumps(
        [[name if type(name) is str else repr(name), *_tag(v)] for name, v in original.items()]
    )


def _tag(value: Any) -> tuple[str, Any]:
    if isinstance(value, bytes):
        return "bytes", b64encode(value).decode()
    try:
        if json.loads(json.dumps(value)) == value:
            return "json", value
    except (TypeError, ValueError, RecursionError):
        pass
    return "repr", _text_of(repr, value)  # no source yields such a value


def _unpack(text: str, attributes: Attributes) -> Attributes:
    try:
        return {
            name: b64decode(value, validate=True) if tag == "bytes" else value
            for name, tag, value in json.loads(text)
        }
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"{describe(attributes)}: attribute {ATTRIBUTES!r} was damaged: {error}"
        ) from error


def _data(message: Message[Any]) -> Any:
    if message.data is None or isinstance(message.data, bytes):
        return message.data
    try:
        return encode_data(message)
    except ConquietError:
        pass
    try:  # the attributes may be at fault, such as the content type
        return msgspec.json.encode(message.data)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _text_of(repr, message.data).encode(errors="backslashreplace")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {_text_of(str, error)}"


def _traceback(error: Exception) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as failure:  # noqa: BLE001 - an error that cannot be printed
        return f"(no traceback: {type(failure).__name__})"


def _text_of(write: Any, value: Any) -> str:
    try:
        return str(write(value))
    except Exception as failure:  # noqa: BLE001 - a user's __str__ or __repr__
        return f"(a {type(value).__name__} that cannot be printed: {type(failure).__name__})"


def _printable(text: str) -> str:
    """Escape control characters, which CloudEvents strings cannot hold: a line break is \\n."""
    return _unprintable.sub(lambda found: repr(found[0])[1:-1], text)


def _log(message: Message[Any], error: Exception, answer: Exception | None) -> None:
    if answer is not None:
        logger.error(
            "the sink refused a dead letter; the message is nacked: %s: %r",
            describe(message.attributes),
            answer,
        )
        return
    logger.error(
        "dead letter handler=%s delivery=%d: %s: %s",
        message.handler.name if message.handler is not None else "-",
        message.deliveries,
        describe(message.attributes),
        printable(_reason(error)),
    )


def _ack(messages: Sequence[Message[Any]]) -> None:
    """Ack here, not only in the router, which leaves ack='manual' to the handler."""
    for message in messages:
        message.locals[IS_DEAD] = True
    try:
        settle_after_commit([message.acking for message in messages if message.acking is not None])
    except Exception:
        logger.exception("could not settle dead letters; they will be delivered again")
