"""Live: parts of pages, sent again as server-sent events while a page is open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from conquiet.errors import ConquietError
from conquiet.web import words
from conquiet.web.template import fragment

Part: TypeAlias = Callable[[Request], str]
"""Returns the HTML of a part of a page."""

_LONGEST_SECONDS = 600.0
"""Then the browser connects again, and is authenticated again."""
_LOOK_SECONDS = 0.2
_MOST = 100


class Live:
    """The event streams of open pages; `stop()` ends them, so that the server can end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopping = threading.Event()
        self.open = 0

    def stop(self) -> None:
        self._stopping.set()

    def endpoint(self, part: Part) -> Callable[[Request], object]:
        async def stream(request: Request) -> Response:
            if self.open >= _MOST:
                raise HTTPException(503, "Too many pages are open.")
            return StreamingResponse(
                self._events(request, part),
                media_type="text/event-stream; charset=utf-8",
                headers={"X-Accel-Buffering": "no"},  # a proxy must not buffer them
            )

        return stream

    async def _events(self, request: Request, part: Part) -> AsyncIterator[str]:
        self.open += 1
        try:
            passed = 0.0
            while passed < _LONGEST_SECONDS:
                html = await run_in_threadpool(_or_trouble, part, request)
                yield "".join(f"data: {line}\n" for line in html.splitlines()) + "\n"
                waited = 0.0
                while waited < self._seconds:
                    if self._stopping.is_set():
                        return
                    await asyncio.sleep(_LOOK_SECONDS)
                    waited += _LOOK_SECONDS
                passed += waited
        finally:
            self.open -= 1


def _or_trouble(part: Part, request: Request) -> str:
    """Return the part, or the error in its place: the next refresh may succeed."""
    try:
        return part(request)
    except ConquietError as error:
        return fragment(request, "trouble_part.html", what=str(error), fix=words.advise(str(error)))
