"""Rollups: a day of an ad, counted from telemetry, and counted again when more of it arrives."""

from __future__ import annotations

from sqlalchemy import Engine, insert, select, update

from conquiet import sql
from conquiet.events.catalog import Event, now
from marketplace.catalog import CATALOG, AdDailyRollupReady
from marketplace.service import commands
from marketplace.service.book import Book
from marketplace.service.lifecycle import IllegalTransition
from marketplace.service.tables import AD_DAYS, ADS


class Rollups:
    """Remembers the last revision of each day, so that an older one cannot replace it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ads = Book(engine, ADS, "ad")

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
        at = command.at or now()
        return [CATALOG.event(data, aggregate_id=ad.id, actor=command.actor, occurred_at=at)]

    def _note(self, command: commands.RollUpAd) -> None:
        """The ad's row is locked, so nobody writes the same day meanwhile."""
        day = (AD_DAYS.c.ad_id == command.ad_id) & (AD_DAYS.c.day == command.day)
        new = command.rollup_revision
        with sql.connection(self._engine) as connection:
            known = connection.execute(select(AD_DAYS.c.revision).where(day)).scalar()
            if known is None:
                row = {"ad_id": command.ad_id, "day": command.day, "revision": new}
                connection.execute(insert(AD_DAYS), row)
            elif new > known:
                connection.execute(update(AD_DAYS).where(day), {"revision": new})
            else:
                raise IllegalTransition(
                    f"ad {command.ad_id}: {command.day} has revision {known} already;"
                    f" count again and give it one above that, not {new}"
                )
