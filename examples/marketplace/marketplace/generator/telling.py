"""Telling: what happened becomes an envelope, with an id, and sometimes a wrong one."""

from __future__ import annotations

from random import Random
from typing import Any

from marketplace.generator.clock import moment_text
from marketplace.generator.entry import DOMAIN_TOPIC, TELEMETRY_TOPIC, Entry
from marketplace.generator.faults import FAULTS, pick, thresholds
from marketplace.generator.publication import Publication
from marketplace.generator.witness import Actor, Told, Witness

_CHANGES = ("unknown_type", "unknown_version", "null_data", "invalid_data", "broken_json")
_DATA = {"null_data": "null", "invalid_data": "{}"}
_FIRST_UNKNOWN = 0x8000000


class Telling:
    """Takes the events of the world in time's order, and gives them to the publication."""

    def __init__(
        self, seed: str, faults: frozenset[str], publication: Publication, witness: Witness | None
    ) -> None:
        self._publication = publication
        self._witness = witness
        self._chance = Random(f"{seed}/telling").random
        self._changes, share = thresholds(_CHANGES, faults)
        self._wrong_share = FAULTS["wrong_amounts"] * ("wrong_amounts" in faults)
        self._has_changes = bool(share or self._wrong_share)
        mark = f"{Random(f'{seed}/ids').getrandbits(32):08x}"
        self._form = f"%s-7%03x-8{mark[:3]}-{mark[3:]}%07x"
        self._at = 0
        self._time = self._head = ""
        """How the last moment is written, as a time and in ids: events come in groups."""
        self._count = 0
        self._unknown = _FIRST_UNKNOWN

    def tell(
        self,
        at: int,
        type_: str,
        aggregate_type: str,
        aggregate_id: str,
        data: str,
        subject: Any = None,
        detail: Any = None,
        actor: Actor = None,
        foreign: bool = False,
    ) -> str:
        """Publish what happened at that time; the id of the event. `data` is canonical JSON."""
        self._count = count = self._count + 1
        time = self._time if at == self._at else self.text(at)
        event_id = self._form % (self._head, count >> 16, count)
        version: int | None = 1
        reason = self._reason(type_, at, aggregate_id) if self._has_changes else None
        if reason is not None:
            version = 99 if reason == "unknown_version" else 1
            data = _off_by_one(data) if reason == "wrong_amounts" else _DATA.get(reason, data)
        elif self._witness is not None:
            self._witness.happened(type_, subject, at, detail, event_id)
        by = "" if actor is None else _actor(actor)
        payload = (
            f'{{{by}"data":{data},"eventId":"{event_id}","occurredAt":"{time}","version":{version}}}'
        ).encode()
        if reason == "broken_json":
            payload, version, foreign = payload[: len(payload) // 2], None, True
        topic = DOMAIN_TOPIC if aggregate_type else TELEMETRY_TOPIC
        ms = self._publication.due(at, count)
        names = type_, aggregate_type, aggregate_id
        entry = Entry(topic, ms, event_id, *names, time, payload, 1, 0, foreign)
        told = None if self._witness is None else Told(at, version, actor, reason, detail)
        self._publication.publish(entry, told)
        return event_id

    def text(self, at: int) -> str:
        """How a moment is written; the ids of its events begin with it too.

        They are UUIDv7: milliseconds, then a count, its upper bits first, and the seed's mark.
        """
        if at != self._at:
            digits = f"{at:012x}"
            self._head = f"{digits[:8]}-{digits[8:]}"
            self._time = moment_text(at)
            self._at = at
        return self._time

    def _reason(self, type_: str, at: int, aggregate_id: str) -> str | None:
        """What is wrong with the next event, if anything is."""
        if type_ == "order_created" and self._chance() < self._wrong_share:
            return "wrong_amounts"
        draw = self._chance()
        if not self._changes or draw >= self._changes[-1][0]:
            return None
        name = pick(self._changes, draw)
        if name == "unknown_type":  # one more event, beside the one that is being told
            self._tell_unknown(at, aggregate_id)
            return None
        return name

    def _tell_unknown(self, at: int, aggregate_id: str) -> None:
        self._unknown += 1  # apart, so that the ids of the others stay what they are without it
        time = self.text(at)
        event_id = self._form % (self._head, self._unknown >> 16, self._unknown)
        payload = (
            f'{{"data":{{"checkout_group_id":"{aggregate_id}"}},"eventId":"{event_id}",'
            f'"occurredAt":"{time}","version":1}}'
        ).encode()
        ms = self._publication.due(at, self._count)
        names = "checkout_converted", "checkout_group", aggregate_id
        entry = Entry(DOMAIN_TOPIC, ms, event_id, *names, time, payload, is_foreign=True)
        self._publication.publish(entry, Told(at, 1, None, "unknown_type", None))


def _actor(actor: tuple[str, str, str]) -> str:
    return f'"actor":{{"id":"{actor[1]}","storeId":"{actor[2]}","type":"{actor[0]}"}},'


def _off_by_one(data: str) -> str:
    """An `order_created` whose total does not add up."""
    head, name, rest = data.rpartition('"total_cents":')
    digits = rest[: rest.index(",")]
    return f"{head}{name}{int(digits) + 1}{rest[len(digits) :]}"
