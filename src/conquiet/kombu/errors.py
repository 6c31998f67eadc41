"""The errors of the transport."""

from __future__ import annotations

from conquiet.errors import ConfigError


class OptionError(ConfigError, ValueError):
    """A transport option that would lose or double messages, or a value it cannot have."""


class AlternateError(ConfigError, ValueError):
    """An alternate URL that would fail over to another transport, which has other keys."""


class ServerTooOld(ConfigError):
    """The server lacks commands that the transport is built on."""
