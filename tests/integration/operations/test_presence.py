"""Who is alive: workers by their leases, relays by their sessions and their health."""

from __future__ import annotations

from conquiet.operations.presence import check_relays, list_sessions, list_workers
from conquiet.relay.health import Check, Health, HealthServer
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
        {"sink": Check(look, timeout=1, fresh=0)}, alive=lambda: None, metrics=lambda: b""
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
