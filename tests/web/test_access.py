"""Who gets in, by which way, and what everybody else sees."""

from __future__ import annotations

import re

import pytest
from starlette.routing import Route

from conquiet.config import is_loopback
from conquiet.errors import ConfigError
from conquiet.web import Basic, Header, Token, dashboard
from conquiet.web.access import SESSION_SECONDS, Open, Signer
from conquiet.web.guard import HEADERS
from tests.web.browsing import Browser

TOKEN = "a-token-that-is-long-enough"
HTML = {"accept": "text/html"}


def paths(app, method):
    return [
        route.path for route in app.routes if isinstance(route, Route) and method in route.methods
    ]


def test_without_a_token_no_page_is_seen(make) -> None:
    app = make(auth=Token(TOKEN))
    client = Browser(app, follow_redirects=False)
    free = {"/login", "/healthz"}
    for path in set(paths(app, "GET")) - free:
        answer = client.get(path)
        assert answer.status_code == 401, path
        assert "Overview" not in answer.text
        asked = client.get(path, headers=HTML)
        assert (asked.status_code, asked.headers["location"]) == (303, "/login"), path
    for path in set(paths(app, "POST")) - free:
        assert client.post(path, data={"id": "1"}).status_code == 401, path


def test_the_form_says_nothing_of_what_is_behind_it(make, shop) -> None:
    client = Browser(make(auth=Token(TOKEN)))
    assert shop.redis not in client.get("/login").text
    assert "sqlite" not in client.get("/login").text
    client.get("/login", params={"token": TOKEN})
    assert shop.redis in client.get("/").text


def test_the_link_with_the_token_lets_in_by_a_cookie(make) -> None:
    client = Browser(make(auth=Token(TOKEN)))
    entered = client.get("/login", params={"token": TOKEN})
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert TOKEN not in entered.text
    assert client.get("/").status_code == 200
    assert client.get("/login", follow_redirects=False).headers["location"] == "/"


def test_the_form_takes_the_token_and_nothing_else(make) -> None:
    client = Browser(make(auth=Token(TOKEN)))
    for wrong in ("", "x", f"{TOKEN}x", "\ud83d".encode(errors="surrogatepass").decode("latin1")):
        assert client.post("/login", data={"token": wrong}).status_code == 401
        assert client.get("/").status_code == 401
    assert client.post("/login", data={"token": TOKEN}).status_code == 200
    assert client.get("/").status_code == 200


def test_a_session_ends_by_signing_out_by_time_and_by_a_new_token(make, monkeypatch) -> None:
    client = Browser(make(auth=Token(TOKEN)))
    client.get("/login", params={"token": TOKEN})
    other = Browser(make(auth=Token(f"{TOKEN}-of-another")), cookies=dict(client.cookies))
    assert other.get("/").status_code == 401
    now = __import__("time").time()
    with monkeypatch.context() as later:
        later.setattr("conquiet.web.access.time.time", lambda: now + SESSION_SECONDS + 1)
        assert client.get("/").status_code == 401
    csrf = re.search(r'name="csrf" value="(\w+)"', client.get("/").text)[1]
    client.post("/logout", data={"csrf": "wrong"})
    assert client.get("/").status_code == 200
    client.post("/logout", data={"csrf": csrf})
    assert client.get("/").status_code == 401


def test_a_cookie_that_was_made_up_counts_for_nothing(make) -> None:
    app = make(auth=Token(TOKEN))
    forged = Signer("a guess").sign("session", {"id": "x", "until": 9e12})
    from conquiet.web.access import cookie_name

    client = Browser(app, cookies={cookie_name(app.signer): forged})
    assert client.get("/").status_code == 401


def test_programs_may_show_the_token_in_a_header(make) -> None:
    client = Browser(make(auth=Token(TOKEN)))
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/", headers={"authorization": "Bearer x"}).status_code == 401


def test_a_name_and_a_password(make) -> None:
    client = Browser(make(auth=Basic("ann", "correct horse")))
    asked = client.get("/")
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"].startswith("Basic ")
    assert client.get("/", auth=("ann", "correct horse")).status_code == 200
    for wrong in (("ann", "x"), ("bob", "correct horse"), ("", "")):
        assert client.get("/", auth=wrong).status_code == 401
    assert client.get("/", headers={"authorization": b"Basic \xe4"}).status_code == 401
    assert client.get("/login").status_code == 404


def test_a_header_counts_only_from_a_proxy(make) -> None:
    app = make(auth=Header("X-Forwarded-User", ["10.0.0.0/8"]))
    said = {"X-Forwarded-User": "ann"}
    inside = Browser(app, client=("10.1.2.3", 5000))
    assert inside.get("/", headers=said).status_code == 200
    assert inside.get("/").status_code == 401
    outside = Browser(app, client=("192.0.2.1", 5000))
    assert outside.get("/", headers=said).status_code == 401


def test_other_names_in_the_address_bar_are_refused(make, client) -> None:
    for host in ("127.0.0.1", "localhost:8082", "[::1]:8082"):
        assert client.get("/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[", "ops.example.com"):
        answer = client.get("/", headers={"host": host})
        assert answer.status_code == 400
        assert "--allowed-hosts" in answer.text
    assert client.get("/healthz", headers={"host": "10.1.2.3:8082"}).text == "ok\n"  # a probe
    named = Browser(make(allowed_hosts=["ops.example.com"]))
    assert named.get("/", headers={"host": "OPS.example.com:80"}).status_code == 200
    public = Browser(make(public_url="https://ops.example.com"))
    assert public.get("/", headers={"host": "ops.example.com"}).status_code == 200


def test_every_answer_has_the_headers_that_protect_it(make) -> None:
    client = Browser(make(auth=Token(TOKEN)))
    client.get("/login", params={"token": TOKEN})
    addresses = ("/", "/login", "/nothing", "/static/dashboard.css", "/healthz")
    answers = [client.get(path) for path in addresses]
    answers.append(client.get("/", headers={"host": "evil.example"}))
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'self'" in policy
    assert answers[0].headers["cache-control"] == "no-store"
    assert "max-age" in answers[3].headers["cache-control"]


def test_cookies_are_for_https_alone_where_that_is_spoken(make) -> None:
    client = Browser(make(auth=Token(TOKEN), public_url="https://127.0.0.1"))
    assert "Secure" in client.get("/login", params={"token": TOKEN}).headers["set-cookie"]
    plain = Browser(make(auth=Token(TOKEN)))
    assert "Secure" not in plain.get("/login", params={"token": TOKEN}).headers["set-cookie"]


def test_secrets_are_not_shown(make, shop) -> None:
    app = make(
        auth=Token(TOKEN),
        database="postgresql://app:hunter2@127.0.0.1:1/shop?password=hunter3",
        broker="redis://:hunter4@127.0.0.1:1/0",
    )
    client = Browser(app)
    client.get("/login", params={"token": TOKEN})
    for path in ("/", "/streams", "/outbox", "/processes", "/trace?id=x"):
        text = client.get(path).text
        assert "hunter" not in text
        assert TOKEN not in text
    assert TOKEN not in repr(app.access)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Token("short"),
        lambda: Basic("ann", "short"),
        lambda: Basic("", "long enough"),
        lambda: Header("not a name"),
        lambda: Header(proxies=["nowhere"]),
        lambda: dashboard(auth=Open(), public_url="ops.example.com"),
        lambda: dashboard(auth=Open(), broker="redis://h/0?nonsense=1"),
        lambda: dashboard(auth=Open(), database="mysql://h/d"),
    ],
)
def test_weak_settings_are_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        wrong()


def test_loopback_is_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))
    assert Open().who(None, None) == "anonymous"


def test_without_auth_of_its_own_a_token_is_made_and_told(make, capsys, monkeypatch) -> None:
    monkeypatch.delenv("CONQUIET_DASHBOARD_TOKEN", raising=False)
    app = make(auth=None)
    assert app.access.token in capsys.readouterr().err
    monkeypatch.setenv("CONQUIET_DASHBOARD_TOKEN", TOKEN)
    assert make(auth=None).access.token == TOKEN
    assert TOKEN not in capsys.readouterr().err
