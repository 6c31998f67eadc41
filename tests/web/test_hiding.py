"""Payloads that are hidden are on no page."""

from __future__ import annotations

from tests.web.browsing import Browser


def test_hidden_payloads_are_nowhere(make, shop) -> None:
    [id_] = shop.write(1, secret="iban-12345")
    shop.publish([id_], data=b'{"secret": "iban-12345"}')
    shop.bury(1)
    shop.client.xadd("plain", {"secret": "iban-12345"}, id="5-1")
    [(entry, _)] = shop.client.xrange("orders")
    pages = [
        ("/outbox/row", {"id": id_}),
        ("/entry", {"stream": "orders", "id": entry.decode()}),
        ("/entry", {"stream": "plain", "id": "5-1"}),
        ("/dead-letters/letter", {"stream": "dead", "id": id_}),
    ]
    shown, hidden = Browser(make()), Browser(make(hide_payloads=True))
    for path, params in pages:
        assert "iban-12345" in shown.get(path, params=params).text, path
        text = hidden.get(path, params=params).text
        assert "iban-12345" not in text, path
        assert "idden" in text
    lists = ("/outbox", "/stream?name=orders", "/dead-letters")
    for path in lists:
        assert "iban-12345" in shown.get(path).text, path
    for path in (
        "/",
        "/streams",
        "/stream?name=orders",
        "/stream?name=plain",
        "/outbox",
        "/dead-letters",
    ):
        assert "iban-12345" not in hidden.get(path).text
