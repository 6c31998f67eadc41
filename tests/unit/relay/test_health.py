"""Health: cached checks, three paths, over real HTTP."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import pytest
from tests.waiting import eventually

from conquiet.errors import ConfigError
from conquiet.relay.health import Check, Health, HealthServer


def get(server: HealthServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class Dependency:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()

    def look(self):
        self.go_on.wait(20)
        if self.error is not None:
            raise self.error
        return {"parked": 2}


def test_a_hundred_probes_ask_a_dependency_once() -> None:
    check = Check(Dependency().look, timeout=5, fresh=60)
    assert all(check.answer().ok for _ in range(100))
    assert check.looks == 1


def test_a_dependency_that_hangs_is_asked_once_and_told_in_time() -> None:
    dependency = Dependency()
    dependency.go_on.clear()
    check = Check(dependency.look, timeout=0.05, fresh=0)
    for _ in range(5):
        answer = check.answer()
        assert not answer.ok
        assert "no answer within 0.05 s" in answer.detail["error"]
    assert check.looks == 1
    dependency.go_on.set()
    assert eventually(lambda: check.answer().ok)


def test_what_is_old_is_asked_again() -> None:
    dependency = Dependency()
    check = Check(dependency.look, timeout=5, fresh=0)
    assert check.answer().ok
    dependency.error = ConnectionError("away")
    assert check.answer().detail == {"error": "ConnectionError: away"}


def test_a_look_that_takes_long_is_not_repeated_soon() -> None:
    check = Check(lambda: time.sleep(0.2), timeout=5, fresh=0)
    assert check.answer().ok
    assert check.answer().ok
    assert check.looks == 1


@pytest.fixture
def parts():
    dependency = Dependency()
    trouble: list[str] = []
    health = Health(
        {"database": Check(dependency.look, timeout=5, fresh=0)},
        alive=lambda: trouble[0] if trouble else None,
        metrics=lambda: b"conquiet_relay_pending 0.0\n",
    )
    server = HealthServer(health, "127.0.0.1", 0)
    yield dependency, trouble, health, server
    server.close()


def test_ready_tells_each_dependency_and_what_is_parked(parts) -> None:
    dependency, _, _, server = parts
    status, body = get(server, "/readyz")
    found = json.loads(body)
    assert status == 200
    assert found["checks"]["database"]["parked"] == 2
    dependency.error = ConnectionError("away")
    status, body = get(server, "/readyz?verbose=1")
    assert status == 503
    assert json.loads(body)["checks"]["database"]["error"] == "ConnectionError: away"


def test_not_ready_while_it_stops_but_alive(parts) -> None:
    _, _, health, server = parts
    health.stopping = True
    assert get(server, "/readyz")[0] == 503
    assert get(server, "/healthz")[0] == 200


def test_a_stuck_relay_is_not_alive(parts) -> None:
    _, trouble, _, server = parts
    assert get(server, "/healthz")[0] == 200
    trouble.append("a batch has been under way for 301 s")
    status, body = get(server, "/healthz")
    assert status == 503
    assert "301 s" in json.loads(body)["error"]


def test_metrics_and_other_paths(parts) -> None:
    *_, server = parts
    assert get(server, "/metrics") == (200, b"conquiet_relay_pending 0.0\n")
    assert get(server, "/metrics", "HEAD") == (200, b"")
    assert get(server, "/")[0] == 404


def test_an_address_in_use_is_a_wrong_setting(parts) -> None:
    *_, health, server = parts
    with pytest.raises(ConfigError, match="CONQUIET_OUTBOX_HEALTH"):
        HealthServer(health, "127.0.0.1", server.port)


def test_a_probe_that_hangs_up_leaves_no_traceback(capfd, caplog) -> None:
    caplog.set_level(logging.DEBUG, "conquiet.relay")
    gone = threading.Event()
    health = Health({}, alive=lambda: None, metrics=lambda: b"x" * gone.wait(20))
    server = HealthServer(health, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", server.port)) as probe:
        probe.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.set()
    assert eventually(lambda: "a probe from" in caplog.text)
    server.close()
    assert "Traceback" not in capfd.readouterr().err
