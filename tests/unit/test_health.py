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
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.waiting import eventually

from conquiet.errors import ConfigError
from conquiet.health import Check, Health, HealthServer
from conquiet.relay.process import RelayProcess
from conquiet.relay.settings import load


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
        details=True,
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
    health.begin_stop()
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


def test_without_details_ready_names_no_error_and_no_count() -> None:
    dependency = Dependency()
    dependency.error = ConnectionError("postgresql://app@db.internal/shop: away")
    health = Health(
        {"database": Check(dependency.look, timeout=5, fresh=0)},
        alive=lambda: None,
        metrics=lambda: b"",
    )
    status, _, body = health.respond("/readyz")
    assert status == 503
    assert json.loads(body)["checks"] == {"database": {"ok": False}}


@pytest.mark.parametrize(
    ("address", "asked_for", "named"),
    [
        ("127.0.0.1:0", "false", True),
        ("localhost:0", "false", True),
        ("0.0.0.0:0", "false", False),
        ("0.0.0.0:0", "true", True),
    ],
)
def test_a_relay_names_details_on_loopback_or_if_asked_to(
    tmp_path, address, asked_for, named
) -> None:
    (tmp_path / "shop.sqlite").touch()
    flags = {
        "database": f"sqlite:///{tmp_path}/shop.sqlite",
        "sink": f"file:{tmp_path}/events.jsonl",
        "health": address,
        "health_details": asked_for,
    }
    process = RelayProcess(load(flags, environ={}))
    try:
        assert process.server is not None
        status, body = get(process.server, "/readyz")
    finally:
        process._open.close()
    assert status == 503  # the tables are missing
    assert ("error" in json.loads(body)["checks"]["database"]) is named


def trickle(server: HealthServer, count: int) -> Iterator[socket.socket]:
    for _ in range(count):
        slow = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        slow.sendall(b"GET /healthz HTTP/1.0\r\nx-")
        yield slow


def test_slow_clients_take_neither_threads_nor_the_place_of_a_probe(parts, monkeypatch) -> None:
    monkeypatch.setattr("conquiet.health._REQUEST_SECONDS", 60)
    *_, server = parts
    before = threading.active_count()
    slow = list(trickle(server, 300))
    try:
        assert get(server, "/healthz")[0] == 200
        assert eventually(lambda: threading.active_count() - before <= 32)
        assert get(server, "/readyz")[0] == 200
    finally:
        for one in slow:
            one.close()


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_probes_whose_checks_hang_are_bounded_as_well() -> None:
    dependency = Dependency()
    dependency.go_on.clear()
    check = Check(dependency.look, timeout=60)
    health = Health({"database": check}, alive=lambda: None, metrics=lambda: b"")
    server = HealthServer(health, "127.0.0.1", 0)
    asked = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(60)]
    try:
        for one in asked:
            with suppress(OSError):  # refused, as one too many
                one.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert eventually(lambda: sum(map(is_closed, asked)) == 60 - 32)
    finally:
        dependency.go_on.set()
        for one in asked:
            one.close()
        server.close()


def test_a_request_has_one_deadline(parts, monkeypatch) -> None:
    """A byte now and then is in time for each read, and must not keep a thread."""
    monkeypatch.setattr("conquiet.health._REQUEST_SECONDS", 0.2)
    *_, server = parts
    [slow] = trickle(server, 1)

    def drip() -> bool:
        with suppress(OSError):
            slow.sendall(b"x")
        return is_closed(slow)

    with slow:
        assert eventually(drip)


def test_an_address_in_use_is_a_wrong_setting(parts) -> None:
    *_, health, server = parts
    with pytest.raises(ConfigError, match=r"--health: 127\.0\.0\.1:"):
        HealthServer(health, "127.0.0.1", server.port, "--health")


def test_a_probe_that_hangs_up_leaves_no_traceback(capfd, caplog) -> None:
    caplog.set_level(logging.DEBUG, "conquiet.health")
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
