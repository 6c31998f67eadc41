"""Whatever is sent to the dashboard as a form, it is read or refused with a status of its own."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import Request
from tests.security.hostile import damaged, fuzzed

from conquiet.web.access import Signer
from conquiet.web.forms import read, read_entry_id, read_query

bodies = (
    st.binary(max_size=80)
    | damaged(st.just(b"csrf=a&id=1-1&stream=orders%20b"))
    | st.sampled_from(
        [
            b"a=" + b"x" * 70_000,
            b"&".join(b"a=1" for _ in range(100)),
            b"%ff=%00&%zz",
            b"a=" + b"%00" * 50,
        ]
    )
)
FORM = b"application/x-www-form-urlencoded"


def request(body=b"", query=b"", kind=FORM):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query}
    return Request({**scope, "headers": [(b"content-type", kind)]}, receive)


@fuzzed()
@given(
    bodies,
    st.sampled_from([FORM, FORM + b"; charset=latin-1", b"multipart/form-data", b"", b"\xff"]),
)
def test_forms(body, kind) -> None:
    try:
        form = asyncio.run(read(request(body, kind=kind)))
    except HTTPException as error:
        status = error.status_code
        form = {}
        if status not in (400, 413, 415):
            raise
    assert all("\0" not in value and len(value) <= 2_000 for value in form.values())


@fuzzed()
@given(st.binary(max_size=40) | damaged(st.just(b"id=1700000000000-0")))
def test_parameters(query) -> None:
    read_query(request(query=query), "id")
    try:
        read_entry_id(request(query=query), "id")
    except HTTPException as error:
        if error.status_code != 400:
            raise


@fuzzed()
@given(
    st.text(max_size=60)
    | damaged(st.just(Signer("a").sign("note", {"n": 1}).encode())).map(
        lambda data: data.decode("latin-1")
    )
)
def test_cookies_that_we_did_not_sign(text) -> None:
    assert Signer("b").read("note", text) is None
