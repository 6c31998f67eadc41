"""Derives the commands that lead to a generated history, to be sent through the services."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from conquiet import Message
from marketplace.generator.entry import Entry
from marketplace.service import commands as asked

SOURCE = "/generator"

_DECISIONS = ("accepted", "partially_accepted", "rejected")
_MOVES: dict[str, type[msgspec.Struct]] = {
    "ready_for_dispatch": asked.MarkReady,
    "in_transit": asked.DispatchOrder,
    "delivered": asked.DeliverOrder,
    "closed": asked.CloseOrder,
}
_COPIED: dict[str, type[msgspec.Struct]] = {
    "order_canceled": asked.CancelOrder,
    "order_expired": asked.ExpireOrder,
    "cash_collected": asked.CollectCash,
    "payment_settled": asked.SettlePayment,
    "vendor_payout_recorded": asked.PayOut,
    "ad_created": asked.CreateAd,
    "ad_updated": asked.UpdateAd,
    "ad_activated": asked.ActivateAd,
    "ad_paused": asked.PauseAd,
    "ad_expired": asked.ExpireAd,
    "ad_daily_rollup_ready": asked.RollUpAd,
    "media_uploaded": asked.RecordUpload,
}


class _History:
    def __init__(self) -> None:
        self._rejected: dict[str, list[str]] = {}

    def command(
        self, type_: str, data: dict[str, Any]
    ) -> tuple[type[msgspec.Struct], dict[str, Any]] | None:
        """Return the command of an event, if it is the first event of that command."""
        if type_ in _COPIED:
            return _COPIED[type_], data
        other: dict[
            str, Callable[[dict[str, Any]], tuple[type[msgspec.Struct], dict[str, Any]] | None]
        ] = {
            "order_created": self._placed,
            "line_item_state_changed": self._decided,
            "order_state_changed": self._moved,
            "license_status_changed": self._licensed,
        }
        return other[type_](data) if type_ in other else None

    def _placed(self, data: dict[str, Any]) -> tuple[type[msgspec.Struct], dict[str, Any]]:
        tokens = (data.get("attribution") or {}).get("token_ids", [])
        postal_code = data["ship_to"]["postal_code"]
        return asked.PlaceOrder, {**data, "token_ids": tokens, "postal_code": postal_code}

    def _decided(self, data: dict[str, Any]) -> None:
        if data["to_status"] == "rejected":
            self._rejected.setdefault(data["order_id"], []).append(data["line_item_id"])

    def _moved(self, data: dict[str, Any]) -> tuple[type[msgspec.Struct], dict[str, Any]]:
        to = data["to_status"]
        if to not in _DECISIONS:
            return _MOVES[to], data
        rejected = self._rejected.pop(data["order_id"], [])
        return asked.AcceptLines, {**data, "rejected": rejected}

    def _licensed(self, data: dict[str, Any]) -> tuple[type[msgspec.Struct], dict[str, Any]]:
        kinds: dict[str, type[msgspec.Struct]] = {
            "pending_review": asked.SubmitLicense,
            "expired": asked.ExpireLicense,
        }
        return kinds.get(data["status"], asked.ReviewLicense), data


def commands(entries: Iterable[Entry]) -> Iterator[Message[bytes]]:
    """Derive commands, in order of time, from a log without faults; ids follow from the events'.

    What follows from a command by itself (notifications, released reservations) and telemetry
    lead to none.
    """
    history = _History()
    for entry in entries:
        if entry.is_telemetry or entry.delivery > 1:
            continue
        envelope = msgspec.json.decode(entry.data)
        found = history.command(entry.type, envelope["data"])
        if found is None:
            continue
        kind, fields = found
        names = kind.__struct_fields__
        given = {name: value for name, value in fields.items() if name in names}
        given["at"] = envelope["occurredAt"]
        given["actor"] = envelope.get("actor")
        command: msgspec.Struct = msgspec.convert(given, kind)
        yield Message(
            msgspec.json.encode(command),
            {
                "specversion": "1.0",
                "id": f"command-{entry.event_id}",
                "type": _message_type(kind),
                "source": SOURCE,
                "subject": fields.get("order_id", entry.aggregate_id),
                "time": entry.time,
                "datacontenttype": "application/json",
            },
        )


def _message_type(command: type) -> str:
    """Return the type that a router gives to a class: its words, joined by dots."""
    return re.sub(r"(?<!^)(?=[A-Z])", ".", command.__name__).lower()
