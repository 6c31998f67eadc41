"""A Kombu transport over Redis Streams, for Celery: what was received is not lost with its worker.

Importing this module registers `redis-streams://`, `rediss-streams://` and `sentinel-streams://`;
Kombu has no entry point for transports.

    >>> import kombu
    >>> import conquiet.kombu
    >>> kombu.Connection("redis-streams://localhost").transport_cls
    'redis-streams'
"""

from kombu.transport import TRANSPORT_ALIASES

from conquiet.kombu.channel import Channel
from conquiet.kombu.errors import AlternateError, OptionError, ServerTooOld
from conquiet.kombu.qos import QoS
from conquiet.kombu.sentinel import SentinelChannel, SentinelTransport
from conquiet.kombu.transport import Transport

TRANSPORT_ALIASES["redis-streams"] = "conquiet.kombu:Transport"
TRANSPORT_ALIASES["rediss-streams"] = "conquiet.kombu:Transport"
TRANSPORT_ALIASES["sentinel-streams"] = "conquiet.kombu:SentinelTransport"

__all__ = [
    "AlternateError",
    "Channel",
    "OptionError",
    "QoS",
    "SentinelChannel",
    "SentinelTransport",
    "ServerTooOld",
    "Transport",
]
