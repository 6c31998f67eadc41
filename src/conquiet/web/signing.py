"""Signed texts: what a browser keeps for us and must not change."""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any


class Signer:
    """Signs with keys that are made of one secret, another key for each purpose.

    >>> signer = Signer("a secret")
    >>> text = signer.sign("note", {"n": 1})
    >>> signer.read("note", text)
    {'n': 1}
    >>> signer.read("session", text) is None
    True
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def digest(self, purpose: str, text: str = "") -> str:
        key = hmac.digest(self._secret, purpose.encode(), sha256)
        return hmac.new(key, text.encode(), sha256).hexdigest()

    def sign(self, purpose: str, value: Any) -> str:
        text = urlsafe_b64encode(json.dumps(value).encode()).decode()
        return f"{text}.{self.digest(purpose, text)}"

    def read(self, purpose: str, signed: str | None) -> Any:
        """What was signed; None if it was not, or not by us."""
        text, _, digest = (signed or "").rpartition(".")
        if not text or not same(digest, self.digest(purpose, text)):
            return None
        return json.loads(urlsafe_b64decode(text))


def same(given: str, wanted: str) -> bool:
    """Whether two texts are equal; takes as long whatever they differ in."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), wanted.encode())
