"""Whatever producers write, it is text: in no page does it become part of the page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from conquiet.web.template import HERE
from tests.web.browsing import Browser

EVIL = "<script>window.stolen=1</script><img src=x onerror=window.stolen=1>\"'&{{7*7}}"
NAME = "<img src=x onerror=window.stolen=1>"


def poison(shop) -> str:
    """An event whose every text is an attack, in every place; its id."""
    [id_] = shop.write(1, EVIL, evil=EVIL)
    shop.mark([id_], "parked_at", attempts=3, error=EVIL)
    shop.publish([id_], stream=NAME, type_=EVIL, data=f'{{"evil": "{NAME}"}}'.encode())
    shop.publish([id_], type_=EVIL)
    shop.take(1, group=NAME, consumer=NAME, stream=NAME)
    shop.bury(1, why=EVIL)
    return id_


def poisoned_pages(shop, id_: str) -> list[tuple[str, dict[str, str]]]:
    [(entry, _)] = shop.client.xrange(NAME)
    return [
        ("/", {}),
        ("/live/overview", {}),
        ("/streams", {}),
        ("/stream", {"name": NAME}),
        ("/group", {"stream": NAME, "name": NAME}),
        ("/entry", {"stream": NAME, "id": entry.decode()}),
        ("/outbox", {"type": EVIL}),
        ("/outbox", {"state": "any"}),
        ("/outbox/row", {"id": id_}),
        ("/dead-letters", {"error": "script"}),
        ("/dead-letters", {"stream": NAME}),
        ("/dead-letters/letter", {"stream": "dead", "id": id_}),
        ("/dead-letters/drop", {"stream": "dead", "type": EVIL}),
        ("/processes", {}),
        ("/trace", {"id": id_}),
        ("/trace", {"id": EVIL}),
        ("/stream", {"name": EVIL}),
    ]


class Elements(HTMLParser):
    """What a browser would make of a page; `suspects` is what no template of ours has."""

    def __init__(self) -> None:
        super().__init__()
        self.suspects: list[str] = []

    def handle_starttag(self, tag, attributes) -> None:
        names = {name for name, _ in attributes}
        if tag in ("img", "iframe") or (tag == "script" and "src" not in names):
            self.suspects.append(tag)
        self.suspects += [name for name in names if name.startswith("on") or name == "style"]


def test_no_page_holds_what_an_event_says_as_html(make, shop) -> None:
    id_ = poison(shop)
    client = Browser(make())
    for path, params in poisoned_pages(shop, id_):
        if path.startswith("/live"):
            continue  # its part is that of the page
        text = client.get(path, params=params).text
        found = Elements()
        found.feed(text)
        assert found.suspects == [], path


def test_no_page_changes_its_writing_direction(make, shop) -> None:
    """A reason such as "invoice<U+202E>fdp.exe" would read as another one."""
    turned = "a\u202e\u2066\u200f\u061cb"
    [id_] = shop.write(1, turned)
    shop.mark([id_], "parked_at", attempts=3, error=turned)
    shop.publish([id_], stream=turned, type_=turned, data=f'{{"x": "{turned}"}}'.encode())
    shop.take(1, group=turned, consumer=turned, stream=turned)
    shop.bury(1, stream=turned, why=turned)
    [(entry, _)] = shop.client.xrange(turned)
    client = Browser(make())
    for path, params in [
        ("/", {}),
        ("/streams", {}),
        ("/stream", {"name": turned}),
        ("/group", {"stream": turned, "name": turned}),
        ("/entry", {"stream": turned, "id": entry.decode()}),
        ("/outbox", {"state": "any"}),
        ("/outbox/row", {"id": id_}),
        ("/dead-letters", {"stream": "dead"}),
        ("/dead-letters/letter", {"stream": "dead", "id": id_}),
        ("/dead-letters/drop", {"stream": "dead"}),
        ("/processes", {}),
        ("/trace", {"id": id_}),
    ]:
        text = client.get(path, params=params).text
        assert not set("\u202e\u2066\u200f\u061c") & set(text), path
        assert "a\\u202e\\u2066" in text, path


def test_an_action_names_a_stream_as_it_is(make, shop) -> None:
    """What is shown is escaped; what a form sends back is not."""
    name = "dead\u202e"
    shop.publish(shop.write(1))
    shop.bury(1)
    shop.client.rename("dead", name)
    client = Browser(make())
    text = client.get("/dead-letters/drop", params={"stream": name}).text
    assert f'name="stream" value="{name}"' in text
    assert "1 dead letter of dead\\u202e" in text


def test_notes_are_escaped_too(make, shop) -> None:
    client = Browser(make())
    token = client.app.signer.digest("form", "anonymous")
    done = client.post("/outbox/retry", data={"csrf": token, "id": NAME}, follow_redirects=False)
    assert done.status_code == 303
    text = client.get("/outbox").text
    assert "is not parked any more" in text
    assert "<img" not in text


def test_no_template_switches_the_escaping_off() -> None:
    for path in Path(HERE, "templates").glob("*.html"):
        text = path.read_text()
        assert "safe" not in re.findall(r"\|\s*(\w+)", text), path
        assert "autoescape" not in text, path
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|javascript:", text), path
        assert not re.search(r"(?:src|href)=\"(?!{{|#)", text), path
