"""Claims: take over entries that their consumer let lie. On Redis 6.0, with XPENDING and XCLAIM.

How long an entry may lie is its holder's lease: each consumer notes its own in a hash beside
the stream, so that one with a short lease does not take from one with a long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import redis

from conquiet.redis import ids
from conquiet.redis.delivery import Delivery
from conquiet.redis.group import GroupStream, Pending
from conquiet.redis.ids import FIRST, LAST

logger = logging.getLogger("conquiet.redis")

PAGE = 500
_PAGES_AT_A_TIME = 20
"""A pending list may be long; reading goes on in between."""


class _Claim(NamedTuple):
    """How to claim: from which idle time on, and as which delivery if not as the next."""

    min_idle_ms: int
    deliveries: int | None


class Claims:
    """Looks through the pending lists, every `interval` seconds, for what is stale."""

    def __init__(self, streams: Sequence[GroupStream], lease: float, interval: float) -> None:
        self._streams = streams
        self._lease_ms = max(1, round(lease * 1000))
        self._interval = interval
        self._at = 0
        self._knows_leases = True
        self._may_have_lost = False
        self.next_scan = time.monotonic()
        self.claimed = 0
        self.deleted = 0

    def look_for_lost_replies(self) -> None:
        """A read failed: what Redis gave us in a reply that never came must be found again."""
        self._may_have_lost = True
        self._at = 0
        for stream in self._streams:
            stream.scan_from = FIRST
        self.next_scan = time.monotonic()

    def take(self, found: list[Delivery], room: int) -> None:
        """Up to `room` stale entries, now ours; nothing while the next scan is not due."""
        most = len(found) + room
        while time.monotonic() >= self.next_scan and len(found) < most:
            stream = self._streams[self._at]
            for claim, rows in self._stale(stream, most - len(found)).items():
                found.extend(self._claim(stream, claim, rows))
            if stream.scan_from != FIRST:
                break  # it goes on there with the next read
            self._at = (self._at + 1) % len(self._streams)
            if self._at == 0:
                self._may_have_lost = False
                self.next_scan = time.monotonic() + self._interval

    def _stale(self, stream: GroupStream, room: int) -> dict[_Claim, list[Pending]]:
        """Entries that look stale, from where the last scan stopped."""
        leases: dict[bytes, int] | None = None
        found: dict[_Claim, list[Pending]] = {}
        for _ in range(_PAGES_AT_A_TIME):
            page = stream.pending(stream.scan_from, LAST, PAGE)
            if page and leases is None:
                leases = self._leases(stream)
            for row in page:
                claim = self._how_to_claim(stream, row, leases or {})
                if claim is None:
                    continue
                found.setdefault(claim, []).append(row)
                room -= 1
                if not room:
                    stream.scan_from = ids.next_after(row.id)
                    return found
            if len(page) < PAGE:
                stream.scan_from = FIRST
                return found
            stream.scan_from = ids.next_after(page[-1].id)
        return found

    def _how_to_claim(
        self, stream: GroupStream, row: Pending, leases: dict[bytes, int]
    ) -> _Claim | None:
        if row.id in stream.held:
            return None
        if self._may_have_lost and row.consumer == stream.consumer:
            return _Claim(0, row.deliveries)
        lease_ms = leases.get(row.consumer, self._lease_ms)
        return _Claim(lease_ms, None) if row.idle_ms >= lease_ms else None

    def _claim(self, stream: GroupStream, claim: _Claim, rows: list[Pending]) -> list[Delivery]:
        now = time.monotonic()
        missing = {row.id: row.deliveries + (claim.deliveries is None) for row in rows}
        claimed: list[Delivery] = []
        for entry_id, fields in stream.claim(claim.min_idle_ms, list(missing), claim.deliveries):
            delivery = Delivery(stream, entry_id, fields, missing.pop(entry_id), now)
            stream.held[entry_id] = delivery
            claimed.append(delivery)
        self.claimed += len(claimed)
        if missing:  # others were faster, or the entries are gone
            self.deleted += stream.ack_deleted(missing)
        return claimed

    def _leases(self, stream: GroupStream) -> dict[bytes, int]:
        try:
            return stream.leases() if self._knows_leases else {}
        except redis.ResponseError as error:  # an ACL that knows nothing of this key
            logger.warning("the leases of other consumers cannot be read: %s", error)
            self._knows_leases = False
            return {}
