"""Run Kombu, and so Celery, over Redis Streams: a killed worker loses no message.

Importing this module registers `redis-streams://`, `rediss-streams://` and `sentinel-streams://`;
Kombu has no entry point for transports. `inspection` looks into queues and cleans them up.

    >>> import kombu
    >>> import conquiet.kombu
    >>> kombu.Connection("redis-streams://localhost").transport_cls
    'redis-streams'
"""

from kombu.transport import TRANSPORT_ALIASES

from conquiet.kombu import inspection
from conquiet.kombu.connection import ClusterUnsupported, ServerTooOld
from conquiet.kombu.options import OptionError
from conquiet.kombu.transport import AlternateError, SentinelTransport, Transport

TRANSPORT_ALIASES["redis-streams"] = "conquiet.kombu:Transport"
TRANSPORT_ALIASES["rediss-streams"] = "conquiet.kombu:Transport"
TRANSPORT_ALIASES["sentinel-streams"] = "conquiet.kombu:SentinelTransport"

__all__ = [
    "AlternateError",
    "ClusterUnsupported",
    "OptionError",
    "SentinelTransport",
    "ServerTooOld",
    "Transport",
    "inspection",
]
