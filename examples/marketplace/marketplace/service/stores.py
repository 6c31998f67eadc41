"""Stores: their licenses and the media that they have uploaded."""

from __future__ import annotations

from datetime import date
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from conquiet.events import Event
from marketplace.catalog import CATALOG, LicenseStatusChanged, MediaUploaded
from marketplace.service import commands
from marketplace.service.lifecycle import LICENSE
from marketplace.service.tables import LICENSES, MEDIA, Book


class Licenses:
    """Stores the licenses of stores."""

    def __init__(self, engine: Engine) -> None:
        self._licenses = Book(engine, LICENSES, "license")

    def submit_license(self, command: commands.SubmitLicense) -> list[Event]:
        found = self._licenses.find(command.license_id)
        if found is not None:
            return self._move(command, command.license_id, "pending_review")
        self._licenses.add(
            id=command.license_id,
            store_id=command.store_id,
            license_type=command.license_type,
            status="pending_review",
            expires_on=None,
        )
        data = LicenseStatusChanged(
            command.license_id, command.store_id, command.license_type, "pending_review"
        )
        return [_event(data, command)]

    def review_license(self, command: commands.ReviewLicense) -> list[Event]:
        return self._move(
            command, command.license_id, command.status, command.reason, command.expires_on
        )

    def expire_license(self, command: commands.ExpireLicense) -> list[Event]:
        return self._move(command, command.license_id, "expired", command.reason)

    def _move(
        self,
        command: commands.Command,
        id_: UUID,
        to: str,
        reason: str | None = None,
        expires_on: date | None = None,
    ) -> list[Event]:
        found = self._licenses.get(id_)
        LICENSE.check(id_, found.status, to)
        self._licenses.change(id_, status=to, expires_on=expires_on)
        data = LicenseStatusChanged(
            id_,
            found.store_id,
            found.license_type,
            to,
            from_status=found.status,
            reason=reason,
            expires_on=expires_on,
        )
        return [_event(data, command)]


def _event(data: LicenseStatusChanged, command: Any) -> Event:
    at = command.decided_at
    return CATALOG.event(data, aggregate_id=data.license_id, actor=command.actor, occurred_at=at)


class Media:
    """Stores the list of uploaded files; the files themselves are elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self._media = Book(engine, MEDIA, "media")

    def record_upload(self, command: commands.RecordUpload) -> list[Event]:
        about = {
            "store_id": command.store_id,
            "kind": command.kind,
            "mime_type": command.mime_type,
            "size_bytes": command.size_bytes,
        }
        self._media.add(id=command.media_id, **about)
        at = command.decided_at
        data = MediaUploaded(media_id=command.media_id, uploaded_at=at, **about)  # type: ignore[arg-type]
        return [
            CATALOG.event(data, aggregate_id=command.media_id, actor=command.actor, occurred_at=at)
        ]
