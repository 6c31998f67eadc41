"""Inside another application, under a path of its own."""

from __future__ import annotations

import asyncio
import re

import httpx
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from conquiet.web import Token
from tests.web.browsing import Browser

TOKEN = "a-token-that-is-long-enough"


def test_all_addresses_stay_within_the_mount(make, ids) -> None:
    app = FastAPI()
    app.mount("/ops/conquiet", make(auth=Token(TOKEN)))

    @app.get("/orders")
    def orders() -> list[str]:
        return ["o-1"]

    client = Browser(app)
    asked = client.get("/ops/conquiet/", headers={"accept": "text/html"}, follow_redirects=False)
    assert asked.headers["location"] == "/ops/conquiet/login"
    entered = client.get("/ops/conquiet/login", params={"token": TOKEN})
    assert "Path=/ops/conquiet;" in entered.headers["set-cookie"] + ";"
    seen, wanted = set(), {"/ops/conquiet/"}
    while wanted:
        path = wanted.pop()
        seen.add(path.partition("?")[0])
        answer = client.get(path)
        assert answer.status_code == 200, path
        links = re.findall(r'(?:href|src|hx-get|data-live)="([^"#]+)"', answer.text)
        for link in re.findall(r'action="([^"]+)"', answer.text):
            assert link.startswith("/ops/conquiet/"), (path, link)
        for link in links:
            assert link.startswith("/ops/conquiet/"), (path, link)
            plain = link.partition("?")[0]
            if "live" not in plain and "log" not in plain and plain not in seen | wanted:
                wanted.add(link.replace("&amp;", "&"))
    assert len(seen) > 12
    assert client.get("/orders").json() == ["o-1"]
    assert "content-security-policy" not in client.get("/orders").headers


def test_a_proxy_may_take_the_path_off(make, ids) -> None:
    dashboard = make(auth=Token(TOKEN), public_url="https://ops.example.com/conquiet")
    client = Browser(dashboard, root_path="/conquiet", base_url="https://ops.example.com/conquiet")
    client.get("/login", params={"token": TOKEN})
    assert client.get("/static/dashboard.css").status_code == 200
    assert 'href="/conquiet/outbox"' in client.get("/").text
    assert Browser(dashboard, root_path="/conquiet").get("/conquiet/outbox").status_code == 401


def test_actions_lead_back_into_the_mount(make, ids) -> None:
    dashboard = make()
    client = Browser(Starlette(routes=[Mount("/c", dashboard)]))
    token = dashboard.signer.digest("form", "anonymous")
    done = client.post("/c/outbox/retry-all", data={"csrf": token})
    assert done.history[0].headers["location"] == "/c/outbox"
    assert "3 rows got new attempts" in done.text


def test_its_own_lifespan_lets_go_of_connections(make, ids) -> None:
    dashboard = make()

    async def live() -> None:
        transport = httpx.ASGITransport(dashboard)
        async with (
            dashboard.router.lifespan_context(dashboard),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            assert (await client.get("/")).status_code == 200
            assert dashboard.stores.engine.pool.checkedin() >= 1

    asyncio.run(live())
    assert dashboard.stores.engine.pool.checkedin() == 0


def test_an_engine_and_a_client_of_the_application_are_used_and_left_open(make, shop, ids) -> None:
    dashboard = make(database=shop.engine, broker=shop.client)
    client = Browser(dashboard)
    assert "3 dead letters" in client.get("/").text
    dashboard.close()
    assert shop.client.ping()
    assert "redis://" in client.get("/").text
