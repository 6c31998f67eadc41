"""A dashboard over a filled shop; once as an application in this process, once in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conquiet.web import Dashboard, Open, dashboard
from tests import needs
from tests.web import shop as shops
from tests.web.browsing import Browser
from tests.web.serving import Served, serving

CHROMIUM = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture
def shop(tmp_path: Path, redis_url: str) -> Iterator[shops.Shop]:
    with shops.opened(f"sqlite:///{tmp_path / 'shop.sqlite'}", redis_url) as made:
        yield made


@pytest.fixture
def ids(shop: shops.Shop) -> dict[str, str]:
    return shops.fill(shop)


@pytest.fixture
def make(shop: shops.Shop) -> Iterator[Callable[..., Dashboard]]:
    """A dashboard over the shop, with settings of a test's own."""
    made: list[Dashboard] = []

    def build(**settings: Any) -> Dashboard:
        given = {"database": shop.database, "broker": shop.redis, "auth": Open(), **settings}
        made.append(dashboard(**given))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def client(make: Callable[..., Dashboard]) -> Browser:
    return Browser(make())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a module.

    Not of the session: while Playwright is open, no other test could call `asyncio.run`.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        needs.missing("chromium", "apt-get install --no-install-recommends chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        needs.missing("Playwright", error)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def served(make: Callable[..., Dashboard]) -> Iterator[Served]:
    with serving(make()) as one:
        yield one
