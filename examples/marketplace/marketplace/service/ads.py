"""Ads: their terms, their life, and the rollups of their days.

Impressions and clicks are telemetry, and never come here.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine
from sqlalchemy.dialects import postgresql, sqlite

from conquiet import sql
from conquiet.events import Event
from marketplace.catalog import (
    CATALOG,
    AdActivated,
    AdCreated,
    AdDailyRollupReady,
    AdExpired,
    AdMoved,
    AdPaused,
    AdUpdated,
    Change,
)
from marketplace.service import commands
from marketplace.service.lifecycle import AD, IllegalTransition, Refused
from marketplace.service.tables import AD_DAYS, Book

_TERMS = ("bid_cents_cpm", "daily_budget_cents", "placement")


class Ads:
    """Stores the ads of vendors."""

    def __init__(self, ads: Book) -> None:
        self._ads = ads

    def create_ad(self, command: commands.CreateAd) -> list[Event]:
        terms = {
            "vendor_store_id": command.vendor_store_id,
            "placement": command.placement,
            "target_type": command.target_type,
            "target_id": command.target_id,
            "bid_cents_cpm": command.bid_cents_cpm,
            "daily_budget_cents": command.daily_budget_cents,
            "status": "draft",
        }
        self._ads.add(id=command.ad_id, **terms)
        data = AdCreated(ad_id=command.ad_id, **terms)  # type: ignore[arg-type]
        at = command.decided_at
        return [
            CATALOG.event(data, aggregate_id=command.ad_id, actor=command.actor, occurred_at=at)
        ]

    def update_ad(self, command: commands.UpdateAd) -> list[Event]:
        ad = self._ads.get(command.ad_id)
        if ad.status == "expired":
            raise IllegalTransition(
                f"ad {ad.id} is expired and cannot be changed; create a new one"
            )
        asked = {name: getattr(command, name) for name in _TERMS}
        changed = {
            name: value
            for name, value in asked.items()
            if value is not None and value != getattr(ad, name)
        }
        if not changed:
            raise Refused(f"ad {ad.id}: the command changes nothing; give one of {_TERMS}")
        self._ads.change(ad.id, **changed)
        terms = {name: changed.get(name, getattr(ad, name)) for name in _TERMS}
        data = AdUpdated(
            ad_id=ad.id,
            vendor_store_id=ad.vendor_store_id,
            target_type=ad.target_type,
            target_id=ad.target_id,
            changes=[Change(name, getattr(ad, name), new) for name, new in changed.items()],
            **terms,
        )
        at = command.decided_at
        return [CATALOG.event(data, aggregate_id=ad.id, actor=command.actor, occurred_at=at)]

    def activate_ad(self, command: commands.ActivateAd) -> list[Event]:
        return [self._move(command, "active", AdActivated)]

    def pause_ad(self, command: commands.PauseAd) -> list[Event]:
        return [self._move(command, "paused", AdPaused)]

    def expire_ad(self, command: commands.ExpireAd) -> list[Event]:
        return [self._move(command, "expired", AdExpired)]

    def _move(self, command: commands.MoveAd, to: str, kind: type[AdMoved]) -> Event:
        ad = self._ads.get(command.ad_id)
        AD.check(ad.id, ad.status, to)
        self._ads.change(ad.id, status=to)
        at = command.decided_at
        data = kind(ad.id, ad.vendor_store_id, ad.status, at, command.cause)
        return CATALOG.event(data, aggregate_id=ad.id, actor=command.actor, occurred_at=at)


class Rollups:
    """Stores the last revision of each day, so that an older one cannot replace it."""

    def __init__(self, engine: Engine, ads: Book) -> None:
        self._engine = engine
        self._ads = ads
        dialect: Any = postgresql if engine.dialect.name == "postgresql" else sqlite
        new = dialect.insert(AD_DAYS)
        self._store_newer = new.on_conflict_do_update(
            index_elements=["ad_id", "day"],
            set_={"revision": new.excluded.revision},
            where=AD_DAYS.c.revision < new.excluded.revision,
        ).returning(AD_DAYS.c.revision)

    def roll_up_ad(self, command: commands.RollUpAd) -> list[Event]:
        ad = self._ads.get(command.ad_id)
        self._note(command)
        data = AdDailyRollupReady(
            ad_id=ad.id,
            vendor_store_id=ad.vendor_store_id,
            day=command.day,
            timezone=command.timezone,
            impressions=command.impressions,
            clicks=command.clicks,
            spend_micros=command.spend_micros,
            rollup_revision=command.rollup_revision,
        )
        at = command.decided_at
        return [CATALOG.event(data, aggregate_id=ad.id, actor=command.actor, occurred_at=at)]

    def _note(self, command: commands.RollUpAd) -> None:
        """Store the revision of a day, unless it has that one or a higher one already."""
        row = {"ad_id": command.ad_id, "day": command.day, "revision": command.rollup_revision}
        with sql.connection(self._engine) as connection:
            if connection.execute(self._store_newer, row).one_or_none() is None:
                raise IllegalTransition(
                    f"ad {command.ad_id}: {command.day} has revision {command.rollup_revision}"
                    " already, or a higher one; count again and give it one above that"
                )
