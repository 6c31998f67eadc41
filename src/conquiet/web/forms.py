"""Forms: how actions are asked for, and how it is known that a page of ours asks.

Every action is made by `action`, so that none can forget the check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from conquiet.web.signing import same

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

logger = logging.getLogger("conquiet.web")

_MOST_BYTES = 64 * 1024
_MOST_FIELDS = 40
_MOST_CHARS = 2_000
FIELD = "csrf"

Form: TypeAlias = Mapping[str, str]
Act: TypeAlias = Callable[[Request, Form], Response]


def token_of(request: HTTPConnection) -> str:
    """What a form must carry to be one of ours, for whoever asks."""
    app: Dashboard = request.app
    return app.signer.digest("form", str(request.scope.get("conquiet.who", "")))


def action(act: Act) -> Callable[[Request], object]:
    """An endpoint for POST: reads the form, and refuses what no page of ours has sent."""

    async def endpoint(request: Request) -> Response:
        app: Dashboard = request.app
        form = await read(request)
        if not same(form.get(FIELD, ""), token_of(request)):
            raise HTTPException(
                403, "This form is from an older session; nothing was done. Open the page anew."
            )
        if app.read_only:
            raise HTTPException(403, "This dashboard only reads: it was started with --read-only.")
        peer = request.client.host if request.client else "somewhere"
        what = {name: value for name, value in form.items() if name != FIELD and value}
        logger.info(
            "%s %s by %s from %s", request.url.path, what, request.scope["conquiet.who"], peer
        )
        return await run_in_threadpool(act, request, form)

    return endpoint


async def read(request: Request) -> Form:
    """The fields of a form, as browsers send them without files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form is expected.")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise HTTPException(413, "This form is too long.")
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise HTTPException(400, "This form cannot be read.") from None
    return {name: clean(value) for name, value in fields}


def asked(request: Request, name: str) -> str:
    """A parameter of the address; empty if it is not there."""
    return clean(request.query_params.get(name, ""))


def asked_entry(request: Request, name: str) -> str:
    """The id of an entry of a stream; empty if none is there."""
    text = asked(request, name)
    if not text:
        return ""
    from conquiet.redis import ids

    if not ids.is_valid(text):
        raise HTTPException(400, f"{text!r:.60} is no id of an entry, such as 1700000000000-0.")
    return text


def clean(text: str) -> str:
    """Without what no store can take, and not endless."""
    return text.replace("\0", "")[:_MOST_CHARS]
