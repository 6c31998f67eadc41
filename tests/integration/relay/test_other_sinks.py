"""`conquiet relay run` with a sink by URL that is not Redis: over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.integration.sql.claiming import fill, unpublished
from tests.waiting import eventually

QUICK = ("--poll-ms", "50", "--longest-pause-seconds", "0.2")


class Receiver(ThreadingHTTPServer):
    """Takes every event, and keeps its headers."""

    daemon_threads = True

    def __init__(self) -> None:
        self.received: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/events"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.received.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_events_go_to_a_webhook_and_its_absence_is_seen(database, engine, receiver, start):
    fill(engine, 7)
    relay = start(database, receiver.url, *QUICK)
    assert eventually(lambda: unpublished(engine) == 0, timeout=30)
    ids = sorted(headers["ce-id"] for headers in receiver.received)
    assert ids == [f"e-{number}" for number in range(1, 8)]
    assert eventually(lambda: relay.ready()["status"] == 200, timeout=30)
    receiver.socket.close()
    assert eventually(lambda: not relay.ready()["checks"]["sink"]["ok"], timeout=30)
    assert relay.stop() == 0
