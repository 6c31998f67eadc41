"""The services of the marketplace: commands in; business tables and `outbox_events` out."""

from conquiet.marketplace.service.lifecycle import (
    IllegalTransition,
    NotFound,
    Refused,
    WrongAmount,
)
from conquiet.marketplace.service.routing import marketplace_router
from conquiet.marketplace.service.tables import init

__all__ = [
    "IllegalTransition",
    "NotFound",
    "Refused",
    "WrongAmount",
    "init",
    "marketplace_router",
]
