"""Troubles: errors as pages that say what happened and what mends it; the process lives on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from conquiet.errors import ConfigError, NotFound
from conquiet.web.advice import advice
from conquiet.web.rendering import page

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

logger = logging.getLogger("conquiet.web")


def _of_store(request: Request, error: Exception) -> Response:
    logger.warning("%s: %s", request.url.path, error)
    return _page(request, 503, "Out of reach", str(error), advice(str(error)))


def _not_found(request: Request, error: Exception) -> Response:
    return _page(request, 404, "Not found", str(error), "")


def _wrong(request: Request, error: Exception) -> Response:
    return _page(request, 400, "That cannot work", str(error), "")


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = {403: "Refused", 404: "Not found", 405: "Not that way"}.get(error.status_code, "No")
    text = error.detail
    if error.status_code == 404:
        text = "There is no such page here."
    return _page(request, error.status_code, title, text, "")


def _unexpected(request: Request, error: Exception) -> Response:
    return _page(
        request,
        500,
        "Something broke",
        f"{type(error).__name__}, in the dashboard itself.",
        "The log of the dashboard says where. Nothing else was affected.",
    )


def _page(request: Request, status: int, title: str, what: str, fix: str) -> Response:
    return page(request, "trouble.html", title, status=status, what=what, fix=fix)


def handlers() -> Mapping[Any, Any]:
    from conquiet.errors import ConquietError

    return {
        ConquietError: _of_store,
        ConfigError: _wrong,
        NotFound: _not_found,
        HTTPException: _http,
        Exception: _unexpected,
    }
