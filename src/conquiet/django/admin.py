"""Show outbox and dead letters in Django's admin, and let them be tried again."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages

from conquiet.django.app import App, find_app
from conquiet.django.models import DeadLetter, OutboxEvent
from conquiet.relay.inspection import Inspection
from conquiet.sql.dialect import begin_to_write
from conquiet.sql.log_group import GroupTables
from conquiet.sql.schema import OUTBOX_TABLE


class ReadOnly(admin.ModelAdmin):  # type: ignore[misc]  # Django has no types
    """Shows rows, and changes them by actions alone."""

    def has_add_permission(self, request: Any) -> bool:
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        return obj is None and bool(super().has_change_permission(request))

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).using(find_app().using)


@admin.register(OutboxEvent)
class OutboxAdmin(ReadOnly):
    list_display = ("event_type", "event_id", "topic", "created_at", "state", "attempts")
    list_filter = (
        ("published_at", admin.EmptyFieldListFilter),
        ("parked_at", admin.EmptyFieldListFilter),
        "topic",
    )
    search_fields = ("event_id", "event_type", "key")
    ordering = ("-id",)
    show_full_result_count = False  # it would count a large table
    actions = ("publish_again",)
    exclude = ("data",)
    readonly_fields = ("payload",)

    def state(self, row: OutboxEvent) -> str:
        if row.parked_at is not None:
            return "parked"
        return "stored" if row.published_at is None else "published"

    def payload(self, row: OutboxEvent) -> str:
        return bytes(row.data).decode(errors="replace")

    # Django has no types.
    @admin.action(description="Let parked events be published", permissions=["change"])  # type: ignore[untyped-decorator]
    def publish_again(self, request: Any, queryset: Any) -> None:
        ids = [str(id_) for id_ in queryset.values_list("pk", flat=True)]
        inspection = Inspection(find_app().store.log.log_engine, OUTBOX_TABLE)
        _report(self, request, len(inspection.retry(ids)), len(ids), "parked")


@admin.register(DeadLetter)
class DeadLetterAdmin(ReadOnly):
    """Shows what the app of the settings has failed to handle, if the database is its log."""

    list_display = ("event", "attempts", "dead_at", "last_error")
    list_select_related = ("event",)
    search_fields = ("event__event_id", "event__event_type", "last_error")
    ordering = ("-event_id",)
    actions = ("replay",)
    readonly_fields = ("payload",)

    def get_queryset(self, request: Any) -> Any:
        # An id is unique within the group of an app, not in the table.
        return (
            super()
            .get_queryset(request)
            .filter(consumer_group=find_app().name, dead_at__isnull=False)
        )

    def payload(self, row: DeadLetter) -> str:
        return bytes(row.event.data).decode(errors="replace")

    # Django has no types.
    @admin.action(description="Let the app try again", permissions=["change"])  # type: ignore[untyped-decorator]
    def replay(self, request: Any, queryset: Any) -> None:
        app = find_app()
        chosen = list(queryset.values_list("pk", "topic"))
        done = sum(_revive(app, id_, topic) for id_, topic in chosen)
        _report(self, request, done, len(chosen), "dead")


def _revive(app: App, id_: int, topic: str) -> bool:
    engine = app.store.log.log_engine
    with begin_to_write(engine) as connection:
        return GroupTables(engine, OUTBOX_TABLE, topic, app.name).revive(connection, id_)


def _report(page: ReadOnly, request: Any, done: int, chosen: int, state: str) -> None:
    level = messages.SUCCESS if done == chosen else messages.WARNING
    others = f"; {chosen - done} were not {state}" if chosen > done else ""
    page.message_user(request, f"{done} will be tried again{others}", level)
