"""Media: what stores have uploaded; the files themselves are elsewhere."""

from __future__ import annotations

from sqlalchemy import Engine

from conquiet.events.catalog import Event, now
from marketplace.catalog import CATALOG, MediaUploaded
from marketplace.service import commands
from marketplace.service.book import Book
from marketplace.service.tables import MEDIA


class Media:
    """Keeps the list of files."""

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
        at = command.at or now()
        data = MediaUploaded(media_id=command.media_id, uploaded_at=at, **about)  # type: ignore[arg-type]
        return [
            CATALOG.event(data, aggregate_id=command.media_id, actor=command.actor, occurred_at=at)
        ]
