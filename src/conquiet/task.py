"""Pack a Celery task as a message: its signature as JSON, and the task's id as the message's id."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import Any

from conquiet.config import require
from conquiet.errors import ConfigError
from conquiet.message import Message, new_id, now_text

KIND = "celery.task"
"""The attribute `kind` of a message that holds a task."""
_SEVERAL = ("chain", "group", "chord", "chunks")
_OF_THE_PROCESS = ("producer", "connection", "publisher", "router", "result_cls", "task_type")


def is_signature(data: Any) -> bool:
    """Return whether data is a Celery signature, as `task.s(…)` returns it."""
    canvas = sys.modules.get("celery.canvas")
    return canvas is not None and isinstance(data, canvas.Signature)


def is_task(message: Message[Any]) -> bool:
    return message.attributes.get("kind") == KIND


def topic_of_tasks(topic: str) -> str:
    """Return the topic of tasks beside the events of a topic, whose consumers do not see them."""
    return f"{topic}.tasks"


def pack_task(given: Message[Any], source: str, id: str | None = None) -> Message[Any]:
    """Return the message of a signature: type is the task's name, id is that of the task.

    A countdown begins here, and so do seconds until the task expires: they become times. It has
    no topic: its outbox gives it that of tasks.
    """
    signature: Mapping[str, Any] = given.data
    name = signature["task"]
    if signature.get("subtask_type") in _SEVERAL:
        raise ConfigError(
            f"task {name}: a {signature['subtask_type']} sends several messages, and an outbox"
            " stores one; emit each task, name the next one by .set(link=…), or emit a task that"
            " calls it"
        )
    options = {
        name: value
        for name, value in (signature.get("options") or {}).items()
        if value is not None and name not in _OF_THE_PROCESS
    }
    chosen = given.attributes.get("id") or options.pop("task_id", None) or id or new_id()
    countdown = options.pop("countdown", None)
    if countdown:
        options["eta"] = _after(countdown)
    if isinstance(options.get("expires"), Real):
        options["expires"] = _after(options["expires"])
    for moment in ("eta", "expires"):
        if isinstance(options.get(moment), datetime):
            options[moment] = options[moment].isoformat()
    stored = {
        "task": name,
        "args": list(signature.get("args") or ()),
        "kwargs": dict(signature.get("kwargs") or {}),
        "options": options,
    }
    attributes = {
        "specversion": "1.0",
        "id": chosen,
        "type": name,
        "source": source,
        "time": now_text(),
        "datacontenttype": "application/json",
    }
    attributes |= {key: value for key, value in given.attributes.items() if value not in (None, "")}
    attributes["kind"] = KIND
    return Message(_write(name, stored), attributes, notbefore=given.notbefore)


def _after(seconds: Any) -> str:
    return (datetime.now(UTC) + timedelta(seconds=float(seconds))).isoformat()


def _write(name: str, stored: Mapping[str, Any]) -> bytes:
    """Write JSON as Celery's own serializer does, so that dates, UUIDs and decimals come back."""
    try:
        text: str = require("kombu.utils.json", "kombu").dumps(stored)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"task {name}: its arguments and options must be JSON, as Celery's default serializer"
            f" writes it: {error}"
        ) from error
    return text.encode()


def read_task(data: bytes) -> dict[str, Any]:
    """Return the signature of a message that holds a task."""
    read: dict[str, Any] = require("kombu.utils.json", "kombu").loads(data)
    return read
