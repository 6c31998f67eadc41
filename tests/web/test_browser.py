"""In a real browser: every page, every action, an attack, the keyboard, a phone, the dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from conquiet.web import Token
from tests.waiting import eventually
from tests.web.serving import serving
from tests.web.test_escaping import NAME, poison, poisoned_pages

TOKEN = "a-token-that-is-long-enough"


class Watched:
    """A page of the browser, and whatever it complained about or asked of other servers."""

    def __init__(self, page: Any, home: str) -> None:
        self.page = page
        self.home = home
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self.home):
            self.elsewhere.append(request.url)

    def go(self, path: str, **query: str) -> Any:
        text = f"?{urlencode(query)}" if query else ""
        answer = self.page.goto(f"{self.home}{path}{text}")
        assert answer.status == 200, path
        return self.page

    def main(self) -> str:
        return str(self.page.inner_text("main"))


@pytest.fixture
def window(chromium, served) -> Iterator[Watched]:
    """A window on the dashboard; in the end it must not have complained about anything."""
    context = chromium.new_context()
    watched = Watched(context.new_page(), served.url)
    yield watched
    context.close()
    assert watched.complaints == []
    assert watched.elsewhere == []


def test_every_page_opens_without_a_complaint(window, shop, ids) -> None:
    [(entry, _)] = shop.client.xrange("orders", count=1)
    letter = {"stream": "dead", "id": ids["published"]}
    for path, query, wanted in (
        ("/", {}, "3 dead letters in 1 place"),
        ("/streams", {}, "billing"),
        ("/stream", {"name": "orders"}, ids["published"]),
        ("/group", {"stream": "orders", "name": "billing"}, "billing-1"),
        ("/entry", {"stream": "orders", "id": entry.decode()}, '"amount": 4200'),
        ("/outbox", {}, "order.shipped"),
        ("/outbox/row", {"id": ids["parked"]}, "message too large"),
        ("/outbox/retry-all", {}, "Give 3 parked rows new attempts?"),
        ("/dead-letters", {}, "LookupError"),
        ("/dead-letters/letter", letter, "Traceback"),
        ("/dead-letters/replay", {"stream": "dead"}, "Replay 3 dead letters"),
        ("/processes", {}, "shipping-1"),
        ("/trace", {"id": ids["published"]}, "billing"),
    ):
        window.go(path, **query)
        assert wanted in window.main(), path


def test_the_overview_is_live_and_can_be_held(window, shop) -> None:
    page = window.go("/")
    page.wait_for_selector("#live[data-state=live]")
    assert "Nothing needs attention" in window.main()
    shop.write(7)
    page.wait_for_selector(".tile:has-text('7 rows')")
    page.click("#live")
    assert page.get_attribute("#live", "aria-pressed") == "false"
    assert page.inner_text("#live") == "Paused"
    page.click("#live")
    page.wait_for_selector("#live[data-state=live]")


def test_a_chart_says_what_is_under_the_pointer_also_after_a_refresh(window, shop) -> None:
    shop.remember(70)
    page = window.go("/")
    page.wait_for_selector("#live[data-state=live]")
    page.locator(".step").nth(30).hover()
    label = page.inner_text(".tip")
    assert re.fullmatch(r"\d\d:\d\d · handled [\d.]+, published [\d.]+ messages/s", label)
    page.evaluate("document.querySelector('#part').firstElementChild.dataset.old = '1'")
    page.wait_for_selector("[data-old]", state="detached")
    page.wait_for_selector(".tip")
    page.click("text=24 h")
    page.wait_for_selector("#window-24h[aria-current]")
    assert page.locator(".step").count() == 3 * 96


def test_boxes_select_letters_of_a_page(window, shop, ids) -> None:
    page = window.go("/dead-letters")
    page.check(".pick-all")
    assert page.locator("input[name=pick]:checked").count() == 3
    page.locator("input[name=pick]").first.uncheck()
    page.click("text=Drop selected…")
    page.click("button:text-is('Drop 2')")
    assert "2 messages dropped." in window.main()
    assert shop.client.xlen("dead") == 1


@pytest.mark.slow
def test_a_search_shows_what_fits_while_one_types(window, ids) -> None:
    page = window.go("/outbox")
    assert page.locator("#found tbody tr").count() == 7
    page.fill("input[name=error]", "too large")
    page.wait_for_selector("#found caption:has-text('3 rows')")
    assert page.locator("#found tbody tr").count() == 3
    page.wait_for_selector("#status:has-text('3 rows')", state="attached")
    assert "error=too%20large" in page.url
    page.select_option("select[name=state]", "published")
    page.wait_for_selector("#found .empty")
    assert page.evaluate("document.activeElement.name") in ("error", "state")


def test_every_action_by_its_buttons(window, shop, ids) -> None:
    page = window.go("/outbox/row", id=ids["parked"])
    page.click("button:text-is('Retry')")
    assert "has new attempts" in window.main()
    window.go("/outbox")
    page.click("text=Retry all 2 parked…")
    page.click("button:text-is('Retry 2')")
    assert "2 rows got new attempts" in window.main()
    window.go("/dead-letters/letter", stream="dead", id=ids["published"])
    page.click("button:text-is('Replay')")
    assert "1 message sent again." in window.main()
    page.click("tbody th a")
    page.click("text=Drop…")
    page.click("text=Do nothing")
    assert shop.client.xlen("dead") == 2
    page.click("tbody th a")
    page.click("text=Drop…")
    page.click("button:text-is('Drop 1')")
    assert "1 message dropped." in window.main()
    page.click("text=Replay all…")
    page.click("button:text-is('Replay 1')")
    assert "1 message sent again." in window.main()
    assert shop.client.xlen("dead") == 0
    page.reload()  # does nothing again
    assert "sent again" not in window.main()


def test_an_attack_in_an_event_stays_text(window, shop) -> None:
    id_ = poison(shop)
    page = window.page
    for path, params in poisoned_pages(shop, id_):
        if path.startswith("/live") or params.get("name", NAME) != NAME:
            continue
        window.go(path, **params)
        assert page.evaluate("window.stolen") is None, path
        assert page.locator("main img").count() == 0, path
    page = window.go("/")
    page.wait_for_selector("#live[data-state=live]")
    assert page.evaluate("window.stolen") is None
    assert NAME in window.main()


@pytest.mark.slow
def test_it_works_with_the_keyboard_alone(window, shop, ids) -> None:
    page = window.go("/outbox/row", id=ids["parked"])
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    press("Enter")
    for _ in range(10):
        press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Retry":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    press("Enter")
    page.wait_for_selector(".note")
    assert "has new attempts" in window.main()


@pytest.mark.slow
def test_a_live_part_keeps_the_focus(window, ids) -> None:
    page = window.go("/")
    page.wait_for_selector("#live[data-state=live]")
    page.focus("#group-2")
    page.evaluate("document.querySelector('#part').firstElementChild.dataset.old = '1'")
    page.wait_for_selector("[data-old]", state="detached")
    assert page.evaluate("document.activeElement.id") == "group-2"


@pytest.mark.slow
def test_every_field_and_button_has_a_name_and_every_table_a_caption(window, ids) -> None:
    for path in ("/", "/streams", "/outbox", "/dead-letters", "/processes", "/trace"):
        page = window.go(path)
        nameless = page.evaluate(
            "[...document.querySelectorAll('input:not([type=hidden]),select,button,a')].filter("
            "one => !one.closest('label') && !one.textContent.trim() && !one.ariaLabel).length"
        )
        assert nameless == 0, path
        assert page.locator("table:not(:has(caption))").count() == 0, path
        assert page.locator("thead th:not([scope])").count() == 0, path
        assert page.locator("h1").count() == 1, path
        assert page.locator("nav [aria-current=page]").count() == 1, path


@pytest.fixture
def phone(chromium, served) -> Iterator[Watched]:
    context = chromium.new_context(
        viewport={"width": 375, "height": 700}, color_scheme="dark", has_touch=True
    )
    watched = Watched(context.new_page(), served.url)
    yield watched
    context.close()
    assert watched.complaints == []


@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_screen_and_the_dark_is_dark(phone, shop, ids) -> None:
    poison(shop)  # its names are long, too
    for path in ("/", "/streams", "/outbox", "/dead-letters", "/processes", "/trace?id=x"):
        page = phone.go(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, path
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, colour[4:-1].split(","))) < 150
    page.emulate_media(color_scheme="light")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, colour[4:-1].split(","))) > 600


@pytest.mark.slow
def test_without_scripts_pages_still_read_and_act(chromium, served, shop, ids) -> None:
    context = chromium.new_context(java_script_enabled=False)
    window = Watched(context.new_page(), served.url)
    page = window.go("/")
    assert "3 dead letters in 1 place" in window.main()
    assert not page.is_visible("#live")
    window.go("/outbox")
    page.fill("input[name=error]", "too large")
    page.click("text=Search")
    assert page.locator("#found tbody tr").count() == 3
    page.click("tbody th a")
    page.click("button:text-is('Retry')")
    assert "has new attempts" in window.main()
    context.close()


def test_signing_in_and_out(chromium, make, ids) -> None:
    with serving(make(auth=Token(TOKEN))) as served:
        context = chromium.new_context()
        window = Watched(context.new_page(), served.url)
        page = window.page
        page.goto(f"{served.url}/login?token={TOKEN}")
        page.wait_for_url(f"{served.url}/")
        page.wait_for_selector("#live[data-state=live]")
        page.click("text=Sign out")
        page.wait_for_url(f"{served.url}/login")
        page.goto(f"{served.url}/outbox")
        assert page.url == f"{served.url}/login"
        page.fill("input[name=token]", TOKEN)
        page.click("button:text-is('Sign in')")
        page.wait_for_url(f"{served.url}/")
        context.close()
        assert window.complaints == []


@pytest.mark.slow
def test_a_server_that_went_away_is_told_and_found_again(window, served, shop) -> None:
    page = window.go("/")
    page.wait_for_selector("#live[data-state=live]")
    eventually(lambda: served.app.live.open == 1)
    served.app.live.stop()
    page.wait_for_selector("#live[data-state=offline]")
    eventually(lambda: served.app.live.open == 0)


@pytest.mark.slow
def test_an_outage_is_told_on_the_live_page_and_its_end_too(chromium, make, private_redis) -> None:
    import redis

    with redis.Redis.from_url(private_redis.url) as client:
        client.xadd("orders", {"a": "1"})
    with serving(make(broker=private_redis.url)) as served:
        context = chromium.new_context()
        window = Watched(context.new_page(), served.url)
        page = window.go("/streams")
        page.wait_for_selector("td:has-text('no group')")
        private_redis.kill()
        page.wait_for_selector(".note.bad:has-text('Redis cannot be reached')")
        private_redis.restart()
        page.wait_for_selector("td:has-text('no group')")
        context.close()
        assert window.complaints == []
