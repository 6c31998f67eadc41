"""Match messages by their attributes, for handlers that take some of a type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from conquiet.errors import ConfigError
from conquiet.message import Message

Matcher: TypeAlias = Callable[[Message[Any]], bool]


def types(*patterns: str) -> Matcher:
    """Match messages of these types; `*` matches any characters.

    >>> types("order.*")(Message(b"", {"type": "order.placed"}))
    True
    """
    return attribute("type", *patterns)


def sources(*patterns: str) -> Matcher:
    """Match messages from these sources; `*` matches any characters."""
    return attribute("source", *patterns)


def attribute(name: str, *patterns: str) -> Matcher:
    """Match messages by an attribute; `*` matches any characters."""
    if not patterns:
        raise ConfigError(f"a matcher on {name!r} needs at least one pattern, such as 'order.*'")
    expression = re.compile("|".join(_expression(pattern) for pattern in patterns), re.DOTALL)

    def matches(message: Message[Any]) -> bool:
        value = message.attributes.get(name)
        return isinstance(value, str) and expression.fullmatch(value) is not None

    return matches


def all_of(*matchers: Matcher) -> Matcher:
    """Match if all matchers do."""
    return lambda message: all(matches(message) for matches in matchers)


def any_of(*matchers: Matcher) -> Matcher:
    """Match if at least one matcher does."""
    return lambda message: any(matches(message) for matches in matchers)


def _expression(pattern: str) -> str:
    return "(?:" + ".*".join(re.escape(part) for part in pattern.split("*")) + ")"
