"""The errors of conquiet: what happened, to which message, and what to change."""

from __future__ import annotations


class ConquietError(Exception):
    """Base of every error that conquiet raises."""


class ConfigError(ConquietError):
    """A setting, a registration or an order that cannot work; raised at start."""


class PermanentError(ConquietError):
    """Trying again cannot help: the message goes to the dead letters at once."""


class InvalidMessage(PermanentError):
    """The message itself is wrong: no type, data that does not fit, too large."""


class ExpiredMessage(PermanentError):
    """The message came after its `expirytime`."""


class NoHandler(ConquietError):
    """Nobody here takes this message; not permanent, since the next release may."""


class NotFound(ConquietError):
    """A stream, a row, a dead letter, a queue or a consumer group of this name does not exist."""


class HandlerError(ConquietError):
    """A handler broke its contract: it returned the wrong thing or ended the interpreter."""


class DeadlineExceeded(ConquietError):
    """A handler ran longer than it was allowed to."""


class Interrupt(BaseException):
    """Raised inside a call that exceeds its time; whoever set the limit catches it.

    Not an `Exception`: a handler's `except Exception` must not keep it from ending.
    """


class Blameless(ConquietError):
    """A failure that is not the message's fault: it is given back and costs no attempt."""


class StoreError(Blameless):
    """The store itself failed (connection, deadlock, serialization): try the batch again."""


class GivenBack(Blameless):
    """The message was not handled: the worker stops, or an earlier one of its key failed."""


class SinkUnavailable(Blameless):
    """The sink cannot be reached at all: nothing of the batch was confirmed."""
