"""The services of the marketplace: commands in; business tables and `outbox_events` out."""

from marketplace.service.lifecycle import (
    IllegalTransition,
    NotFound,
    Refused,
    WrongAmount,
)
from marketplace.service.router import marketplace_router
from marketplace.service.tables import init

__all__ = [
    "IllegalTransition",
    "NotFound",
    "Refused",
    "WrongAmount",
    "init",
    "marketplace_router",
]
