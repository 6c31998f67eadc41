"""Check the settings of a queue when they are created."""

from __future__ import annotations

from dataclasses import dataclass

from conquiet.queue.errors import InvalidSettingError

_LARGEST_INT = 2**63 - 1  # of Redis


@dataclass
class QueueConfig:
    """Names the stream, group and consumer of a queue, and its times.

    `consumer_name` must be unique among running processes: two processes of one name are one
    consumer to Redis. Use the host name and the process id.

    >>> QueueConfig("orders", "billing", "billing-1").block_ms
    5000

    Consumers of one `consumer_group` share the messages of the stream `stream_key`. `QueueConsumer`
    waits `block_ms` in one read, and needs a `max_read_count` of 1; `claim_idle_ms` is for your own
    calls of `claim_stale`.
    """

    stream_key: str
    consumer_group: str
    consumer_name: str
    block_ms: int = 5_000
    max_read_count: int = 1
    claim_idle_ms: int = 60_000

    def __post_init__(self) -> None:
        require_name("stream_key", self.stream_key)
        require_name("consumer_group", self.consumer_group)
        require_name("consumer_name", self.consumer_name)
        require_block_ms(self.block_ms)
        require_int("max_read_count", self.max_read_count, at_least=1)
        require_int("claim_idle_ms", self.claim_idle_ms, at_least=1)


def require_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _refusal(name, value, "a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _refusal(name, value, "a string that UTF-8 can encode") from error


def require_block_ms(value: object) -> None:
    require_int("block_ms", value, at_least=1, because="0 makes Redis wait for ever")


def require_int(name: str, value: object, *, at_least: int, because: str = "") -> None:
    # bool is an int in Python, and True would pass for 1
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not at_least <= value <= _LARGEST_INT
    ):
        allowed = f"an integer of at least {at_least} that fits in 64 bits"
        raise _refusal(name, value, f"{allowed} ({because})" if because else allowed)


def _refusal(name: str, value: object, allowed: str) -> InvalidSettingError:
    return InvalidSettingError(f"{name}={value!r} is not allowed: it must be {allowed}")
