"""Telemetry: what ads were seen and clicked; a topic of its own, in no outbox and no catalog."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

import msgspec

DOMAIN_TOPIC = "pf-domain-events"
TELEMETRY_TOPIC = "pf-ad-telemetry"


class AdImpression(msgspec.Struct):
    token_id: UUID
    ad_id: UUID
    vendor_store_id: UUID
    buyer_store_id: UUID
    placement: str
    target_type: Literal["store", "product"]
    target_id: UUID


class AdClick(AdImpression):
    impression_token_id: UUID


VERSION = 1
KINDS: dict[str, type[msgspec.Struct]] = {"ad_impression": AdImpression, "ad_click": AdClick}
