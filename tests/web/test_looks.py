"""Every page at two widths, light and dark: nothing is cut, nothing is wider than the screen.

The pictures are kept in the folder CONQUIET_SCREENSHOTS, to be looked at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest

from conquiet import App
from tests.web.serving import serving

WIDTHS = {"wide": 1400, "phone": 390}

# Elements of the page whose text is wider than they are, and which hide what does not fit; those
# whose label, before them, reaches into their text; selects that cut their choice; and those that
# reach beyond the screen.
_CUT = """
width => [...document.querySelectorAll('body *')].filter(one => {
  if (one.closest('.hidden, .skip, svg, option, thead') && !one.matches('.scroll')) return false;
  const style = getComputedStyle(one), box = one.getBoundingClientRect();
  if (!box.width || style.visibility === 'hidden') return false;
  const label = getComputedStyle(one, '::before');
  if (label.position === 'absolute' && parseFloat(label.width) > parseFloat(style.paddingLeft)) {
    return true;
  }
  if (one.matches('select')) {
    const line = document.createElement('canvas').getContext('2d');
    line.font = style.font;
    const chosen = one.selectedOptions[0];
    const room = one.clientWidth - parseFloat(style.paddingLeft) - 16;  // the arrow
    return chosen && line.measureText(chosen.textContent).width > room;
  }
  const hides = style.overflowX !== 'visible' && !one.matches('pre, input, select');
  return (hides && one.scrollWidth > one.clientWidth + 1) || box.right > width + 1 || box.left < -1;
}).map(one => `${one.tagName}.${one.className} ${one.textContent.trim().slice(0, 60)}`)
"""

# Text whose contrast with its background is below 4.5, as WCAG 2.2 asks for.
_PALE = """
() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(part => part / 255).map(
    part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4
  ).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = one => {
    for (let at = one; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('body *')].filter(one => {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || one.closest('.hidden, svg, option') || !one.getClientRects().length) return false;
    const [a, b] = [light(parse(getComputedStyle(one).color)), light(ground(one))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  }).map(one => `${one.tagName}.${one.className} ${one.textContent.trim().slice(0, 60)}`);
}
"""


@dataclass
class PlaceOrder:
    id: str
    articles: list[str]


def pages(shop, ids) -> dict[str, str]:
    [(entry, _)] = shop.client.xrange("orders", count=1)
    handler = urlencode({"name": "charge_card", "type": "order.placed"})
    stream = "stream=orders&name=billing"
    return {
        "overview": "/",
        "overview-day": "/?window=24h",
        "handlers": "/handlers",
        "handler": f"/handler?{handler}",
        "streams": "/streams",
        "stream": "/stream?name=orders",
        "group": "/group?stream=orders&name=billing",
        "entry": f"/entry?stream=orders&id={entry.decode()}",
        "trim": "/stream/trim?stream=orders",
        "remove-group": f"/group/remove?{stream}",
        "remove-consumer": f"/consumer/remove?{stream}&consumer=billing-1",
        "outbox": "/outbox?state=any",
        "row": f"/outbox/row?id={ids['parked']}",
        "retry-all": "/outbox/retry-all",
        "later": "/later",
        "dead-letters": "/dead-letters",
        "dead-letter": f"/dead-letters/letter?stream=dead&id={ids['published']}",
        "drop": "/dead-letters/drop?stream=dead",
        "processes": "/processes",
        "trace": f"/trace?id={ids['published']}",
        "interface": "/interface",
    }


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        ("wide", "light"),
        ("phone", "dark"),
        pytest.param("wide", "dark", marks=pytest.mark.slow),
        pytest.param("phone", "light", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_cut_or_pale(chromium, make, shop, ids, tmp_path, width, scheme) -> None:
    shop.remember(24 * 60)
    shop.bury(5, why="card network answered 503 to request 4711")
    shop.enqueue("mail", 7)
    folder = Path(os.environ.get("CONQUIET_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    app = App("shop", shop.engine)

    @app.on
    def place_order(order: PlaceOrder) -> None: ...

    @app.every(minutes=5)
    def count_stock() -> None: ...

    with serving(make(app=app)) as served:
        context = chromium.new_context(
            viewport={"width": WIDTHS[width], "height": 900}, color_scheme=scheme
        )
        page = context.new_page()
        for name, path in pages(shop, ids).items():
            assert page.goto(f"{served.url}{path}").status == 200, path
            if page.locator("#live").count():
                page.wait_for_selector("#live[data-state=live]")
            page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
            wrong += [f"{name}, cut: {one}" for one in page.evaluate(_CUT, WIDTHS[width])]
            wrong += [f"{name}, pale: {one}" for one in page.evaluate(_PALE)]
        context.close()
    assert wrong == []
