"""Who is alive: workers by their leases, relays by their sessions and their health."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from conquiet.health import Check, Health, HealthServer
from conquiet.operations.presence import check_relays, list_sessions, list_workers
from conquiet.sql import engine as make_engine


def test_workers_are_the_consumers_of_all_groups(redis_client, publish, source) -> None:
    publish(2)
    source(group="billing", consumer="a").read(1, 1.0)
    source(group="mail", consumer="b", lease=0.001).read(1, 1.0)
    found = {worker.name: worker for worker in list_workers(redis_client)}
    assert (found["a"].group, found["a"].alive, found["a"].pending) == ("billing", True, 1)
    assert not found["b"].alive
    assert list_workers(redis_client, "other*") == []


def test_relays_are_known_by_the_name_of_their_session(database_url, sqlite_url) -> None:
    relay = make_engine(database_url, connect_args={"application_name": "conquiet-relay"})
    with relay.connect():
        asking = make_engine(database_url)
        [session] = list_sessions(asking)
        assert (session.name, session.client) == ("conquiet-relay", "127.0.0.1")
        assert session.connected_seconds >= 0
        asking.dispose()
    relay.dispose()
    assert list_sessions(make_engine(sqlite_url)) == []


def test_relays_are_asked_for_their_health() -> None:
    state = {"ok": True}

    def look() -> None:
        if not state["ok"]:
            raise ValueError("the sink is gone")

    health = Health(
        {"sink": Check(look, timeout=1, fresh=0)},
        alive=lambda: None,
        metrics=lambda: b"",
        details=True,
    )
    server = HealthServer(health, "127.0.0.1", 0)
    url = f"{server.host}:{server.port}"
    try:
        [found] = check_relays([url])
        assert (found.url, found.alive, found.ready) == (f"http://{url}", True, True)
        state["ok"] = False
        [found] = check_relays([f"http://{url}/"])
        assert (found.alive, found.ready) == (True, False)
        assert "the sink is gone" in found.detail["checks"]["sink"]["error"]
    finally:
        server.close()
    [found] = check_relays([url])
    assert (found.alive, "refused" in found.detail["error"]) == (False, True)


@contextmanager
def answering(answer) -> Iterator[str]:
    """A server that answers every request by `answer(handler)`; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):
                answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_redirect_is_not_followed() -> None:
    """Else a relay's address would choose what the dashboard asks inside its own network."""
    asked: list[str] = []

    def inside(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'{"ready": true}')

    with answering(inside) as secret:

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("location", f"{secret}/readyz")
            handler.end_headers()

        with answering(redirect) as url:
            [found] = check_relays([url])
    assert (found.alive, asked) == (False, [])
    assert "HTTP status 302" in found.detail["error"]


@pytest.mark.parametrize("where", ["header", "body"])
def test_a_relay_that_drips_its_answer_is_not_waited_for(where: str) -> None:
    released = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"\r\n" if where == "body" else b"x: "))
        while not released.wait(0.02):
            handler.wfile.write(b"x")

    with answering(drip) as url:
        began = time.monotonic()
        [found] = check_relays([url], timeout=0.2)
        waited = time.monotonic() - began
        released.set()
    assert not found.alive
    assert "timed out" in found.detail["error"]
    assert waited < 5  # it would go on until it is released
