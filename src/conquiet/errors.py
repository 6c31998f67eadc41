"""Errors of conquiet; their messages name the thing and the fix."""

from __future__ import annotations

from contextlib import suppress

from conquiet.secret import mask_all


class ConquietError(Exception):
    """Base of every error that conquiet raises."""


class ConfigError(ConquietError):
    """A setting, a registration or an order of middlewares is wrong; raised at start.

    >>> print(ConfigError("no such option: redis://app:pa55@db/0"))
    no such option: redis://app:***@db/0
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(mask_all(text))  # it may quote any setting, and so a password


class PermanentError(ConquietError):
    """A retry cannot help: the message goes to the dead letters at once."""


class RetriesExhausted(PermanentError):
    """The message failed after the last of the delays of `Retry`; `__cause__` is its error."""


class InvalidMessage(PermanentError):
    """The message is invalid: no type, wrong data, too large."""


class ExpiredMessage(PermanentError):
    """The message was delivered after its `expirytime`."""


class NoHandler(ConquietError):
    """No handler takes this message; not permanent, since the next release may."""


class UnknownType(NoHandler, PermanentError):
    """No handler takes this message, and `Router(unknown="dead")` makes that permanent."""


class NotFound(ConquietError):
    """A stream, a row, a dead letter, a queue or a consumer group of this name does not exist."""


class HandlerError(ConquietError):
    """A handler broke its contract: it returned a wrong value, or tried to end the process."""


class DeadlineExceeded(ConquietError):
    """A handler exceeded its time limit."""


class Interrupt(BaseException):
    """Interrupts a call that exceeds its time limit; the code that set the limit catches it.

    It is not an `Exception`, so that a handler's `except Exception` does not catch it.
    """


class TryLater(ConquietError):
    """The message failed and shall be tried again later; `__cause__` is its error.

    Its source keeps it for `seconds` and goes on with others. `Retry(delays=…)` raises it.
    """

    def __init__(self, seconds: float, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.seconds = seconds
        self.cause = self.__cause__ = cause


class Blameless(ConquietError):
    """A failure that is not the message's fault: it is redelivered and costs no attempt."""


class StoreError(Blameless):
    """The store itself failed, such as a lost connection: the batch is retried."""

    is_outage = False
    """Whether no message can be the cause: no transaction can begin, or a table is missing."""


class Conflict(StoreError):
    """Another transaction won (deadlock, serialization): the batch is run in smaller groups."""


class GivenBack(Blameless):
    """The message was not handled: the worker stopped, or an earlier one of its key failed."""


class Refused(ConquietError):
    """The receiver of a sink refused one message; the rest of its batch is not affected."""


class SinkUnavailable(Blameless):
    """The sink cannot be reached: no message of the batch was confirmed."""


def note_handler(error: Exception, name: str) -> None:
    """Note the handler that failed, for the dead letter that a source may write."""
    with suppress(AttributeError):  # a class with slots
        error.conquiet_handler = name  # type: ignore[attr-defined]


def handler_of(error: Exception | None) -> str:
    """Return the name that `note_handler` noted; empty if there is none."""
    return str(getattr(error, "conquiet_handler", ""))
