"""The pictures of docs/dashboard.md: `python -m tests.web.screenshots` takes them anew."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from conquiet import embedded
from conquiet.redis import StreamSource
from conquiet.web import Dashboard, Open, dashboard
from tests.web.serving import serving
from tests.web.shop import Shop, opened

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_STEPS = 62
_STEP_SECONDS = 0.25
_HIDE_FOLDERS = """
document.querySelectorAll('.frames code').forEach(one => {
  one.textContent = one.textContent.replace(/^.*[/]tests[/]web[/]/, '/srv/');
})
"""
"""A picture must not depend on where it was taken."""
_TOO_LARGE = "SinkRefused: message of 1,204,880 bytes, the limit of the broker is 1,048,576"


def busy(shop: Shop, app: Dashboard) -> dict[str, str]:
    """Two minutes of a shop in a quarter of a minute; ids for the pictures."""
    dice = random.Random(7)
    shop.remember(24 * 60)
    parked = shop.write(4, "invoice.rendered")
    shop.mark(parked, "parked_at", attempts=10, error=_TOO_LARGE)
    traced = shop.write(1)
    shop.mark(traced, "published_at")
    shop.publish(traced)
    shop.publish([f"01a1e0aa-0000-7000-8000-00000000{n:04d}" for n in range(5)], stream="payments")
    shop.bury(1, why="customer c-1093 has no shipping address")
    shop.bury(3, stream="payments", why="card network answered 503")
    readers = [
        StreamSource(shop.client, "orders", "billing", "billing-1"),
        StreamSource(shop.client, "orders", "billing", "billing-2"),
        StreamSource(shop.client, "orders", "shipping", "shipping-2"),
        StreamSource(shop.client, "payments", "shipping", "shipping-2"),
        StreamSource(shop.client, "payments", "ledger", "ledger-1"),
    ]
    for reader in readers:
        shop.readers.callback(reader.close)
    streams = shop.enqueue("mail", 40)
    shop.client.xreadgroup("conquiet", "box:7:c-1", dict.fromkeys(streams, ">"), count=4)
    made, in_hand = 0, {}
    for step in range(_STEPS):
        count = int(24 + 10 * ((step // 9) % 3) + dice.randrange(9))
        for stream in ("orders", "payments"):
            shop.publish([f"e-{made + n}-{stream}" for n in range(count)], stream=stream)
        made += count
        for reader in readers:
            taken = reader.read(count - 4 + dice.randrange(9), 0.02)
            slow = len(taken) - dice.randrange(1, 9)
            for message in (*in_hand.pop(reader, ()), *taken[:slow]):
                message.ack()
            in_hand[reader] = taken[slow:]
        rows = shop.write(dice.randrange(2, 9), "order.shipped")
        if step % 3:
            shop.mark(rows, "published_at")
        app.pulse._take()
        time.sleep(_STEP_SECONDS)
    return {"parked": parked[0], "traced": traced[0]}


def take(browser: Any, url: str, ids: dict[str, str]) -> None:
    letter = f"/dead-letters/letter?stream=dead&id={ids['traced']}"
    for name, path, scheme, size in (
        ("dashboard", "/", "light", (1200, 1060)),
        ("dashboard-handler", "/handler?name=charge_card&type=order.placed", "light", (1200, 660)),
        ("dashboard-handlers", "/handlers", "light", (1200, 480)),
        ("dashboard-letters", "/dead-letters", "light", (1200, 760)),
        ("dashboard-dark", "/streams", "dark", (1200, 640)),
        ("dashboard-phone", "/", "dark", (390, 780)),
        ("dashboard-outbox", "/outbox?state=parked", "light", (1200, 480)),
        ("dashboard-letter", letter, "dark", (1200, 860)),
        ("dashboard-trace", f"/trace?id={ids['traced']}", "light", (1200, 700)),
    ):
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        page = context.new_page()
        page.goto(url + path)
        page.wait_for_timeout(300)
        page.evaluate(_HIDE_FOLDERS)
        page.screenshot(path=IMAGES / f"{name}.png")
        context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    from tests.web.conftest import CHROMIUM

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, embedded.redis(private=True) as server:
        os.chdir(place)
        with opened("sqlite:///shop.sqlite", server.url) as shop:
            app = dashboard(database=shop.database, broker=shop.redis, auth=Open())
            ids = busy(shop, app)
            # The pictures show the same moment.
            app.pulse._cached._last = (app.pulse._last,)
            app.pulse._cached._until = float("inf")
            with serving(app) as served, sync_playwright() as driver:
                browser = driver.chromium.launch(
                    executable_path=shutil.which("chromium"), args=CHROMIUM
                )
                take(browser, served.url, ids)
                browser.close()
            app.close()


if __name__ == "__main__":
    main()
