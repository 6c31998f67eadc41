"""Define what each transport option means here, and refuse those that would lose messages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conquiet.errors import ConfigError
from conquiet.kombu.layout import PRIORITIES

DEFAULT_LEASE = 60.0
"""Seconds of silence after which the messages of a process are given to others."""


class OptionError(ConfigError, ValueError):
    """A transport option would lose or double messages, or has a value that cannot work."""


@dataclass(frozen=True)
class Option:
    """Describe one line of the table in the docs. `kind`: ours, kept, nothing or refused."""

    name: str
    kind: str
    meaning: str


OURS = (
    Option(
        "lease",
        "ours",
        "seconds of silence after which a process counts as dead and its messages are given to "
        "others (60); its length never limits how long a task may take",
    ),
    Option(
        "delivery_limit",
        "ours",
        "after so many deliveries that ended in a crash or a requeue, a message goes to the "
        "dead-letter stream of its queue with the reason; 0 for never (0)",
    ),
    Option("consumer_id", "ours", "a prefix of the names of consumers in Redis"),
    Option(
        "autoclaim_interval",
        "ours",
        "seconds between looks for the messages of dead processes (a tenth of `lease`)",
    ),
    Option(
        "confirm_acks",
        "ours",
        "true: an ack returns when Redis has it; false: it travels with the next fetch, or within "
        "20 ms (true for Celery tasks that are acked before they run, else false)",
    ),
    Option("prefetch_count", "ours", "the prefetch count of a channel until `basic_qos` sets one"),
)

KEPT = (
    Option("global_keyprefix", "kept", "a prefix of every key"),
    Option(
        "priority_steps",
        "kept",
        "the priorities that have a stream; 0 is the highest; senders and workers need the same",
    ),
    Option("queue_order_strategy", "kept", "round_robin, sorted or priority"),
    Option("fanout_patterns", "kept", "false: a fanout exchange ignores routing keys"),
    Option("polling_interval", "kept", "seconds that a read blocks, 10 at most"),
    Option("socket_timeout", "kept", "as in Kombu, but 10 seconds unless it is set"),
    Option("socket_connect_timeout", "kept", "as in Kombu, but 10 seconds unless it is set"),
    Option("socket_keepalive", "kept", "as in Kombu"),
    Option("socket_keepalive_options", "kept", "as in Kombu"),
    Option("max_connections", "kept", "as in Kombu"),
    Option("health_check_interval", "kept", "as in Kombu; 0 also ends half-open detection"),
    Option("reauth_check_interval", "kept", "as in Kombu, from 5.7 on"),
    Option("retry_on_timeout", "kept", "as in Kombu; a publish may then be there twice"),
    Option("client_name", "kept", "as in Kombu"),
    Option("body_encoding", "kept", "as in Kombu"),
    Option("deadletter_queue", "kept", "as in Kombu: where messages without a route go"),
    Option("master_name", "kept", "Sentinel, as in Kombu"),
    Option("min_other_sentinels", "kept", "Sentinel, as in Kombu"),
    Option("sentinel_kwargs", "kept", "Sentinel, as in Kombu"),
)

NOTHING = (
    Option(
        "visibility_timeout",
        "nothing",
        "a message is never given to others while its process lives; a warning says to set `lease`",
    ),
    Option("ack_emulation", "nothing", "acks are those of Redis, and cannot be switched off"),
    Option("unacked_key", "nothing", "unacked messages are pending entries of their stream"),
    Option("unacked_index_key", "nothing", "as `unacked_key`"),
    Option("unacked_mutex_key", "nothing", "recovery is one atomic script and needs no mutex"),
    Option("unacked_mutex_expire", "nothing", "as `unacked_mutex_key`"),
    Option("unacked_restore_limit", "nothing", "all messages of a dead process are given back"),
    Option("unacked_restore_interval", "nothing", "see `autoclaim_interval`"),
    Option("unacked_restore_throttle", "nothing", "see `autoclaim_interval`"),
    Option("fanout_prefix", "nothing", "PUB/SUB channels begin with the key prefix, as keys do"),
    Option("sentinel_fanout_compat", "nothing", "as `fanout_prefix`"),
    Option("sep", "nothing", "no key or binding contains it"),
)

REFUSED = (
    Option(
        "stream_maxlen",
        "refused",
        "it drops the oldest messages although no consumer has read them; to have that for one "
        "queue, declare it with Queue(..., max_length=n)",
    ),
    Option(
        "consumer_group_prefix",
        "refused",
        "every group of a stream gets every message, so two prefixes would run each task twice; "
        "to separate applications, set global_keyprefix or another database",
    ),
)

TABLE = OURS + KEPT + NOTHING + REFUSED


def check(options: Mapping[str, Any]) -> None:
    """Refuse options that cannot be honoured safely; unknown names pass unchecked."""
    for option in REFUSED:
        if options.get(option.name) is not None:
            raise OptionError(
                f"the transport option {option.name} is not supported: {option.meaning}"
            )
    if options.get("visibility_timeout") is not None:
        warnings.warn(
            "the transport option visibility_timeout means nothing with redis-streams://, where a "
            "message is never given to others while its process lives, however long its task "
            "takes: remove it, and set lease, in seconds (60), for how soon the messages of a "
            "killed process come back",
            stacklevel=2,
        )
    _require(options, "lease", lambda value: 1 <= value < math.inf, "at least 1 second")
    _require(options, "autoclaim_interval", lambda value: value > 0, "more than 0 seconds")
    _require(options, "delivery_limit", _is_count, "a whole number, 0 for no limit")
    _require(options, "prefetch_count", _is_count, "a whole number, 0 for no limit")
    if not isinstance(options.get("confirm_acks"), bool | None):
        raise OptionError(
            f"the transport option confirm_acks is {options['confirm_acks']!r}; it must be true or "
            f"false"
        )
    _check_priorities(options.get("priority_steps"))
    name = options.get("consumer_id")
    if name is not None and (not isinstance(name, str) or not name or name.startswith("~")):
        raise OptionError(
            f"the transport option consumer_id is {name!r}; it must be a name, and ~ is reserved"
        )


def _is_count(value: Any) -> bool:
    return bool(0 <= value < math.inf and int(value) == value)


def _check_priorities(steps: Any) -> None:
    if steps is None:
        return
    is_list = isinstance(steps, list | tuple) and len(steps) > 0
    if not is_list or not all(isinstance(step, int) and step in PRIORITIES for step in steps):
        raise OptionError(
            f"the transport option priority_steps is {steps!r}; it must be a list of whole numbers "
            f"from {PRIORITIES[0]} to {PRIORITIES[-1]}"
        )


def _require(options: Mapping[str, Any], name: str, holds: Any, wanted: str) -> None:
    value = options.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise OptionError(f"the transport option {name} is {value!r}; it must be {wanted}")
