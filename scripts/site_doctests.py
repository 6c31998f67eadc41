"""For the site: examples in docstrings are code; Markdown would take `>>>` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_example = re.compile(r"^(?P<indent> *)>>> .*\n?(?:^(?P=indent)\S.*\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """An example begins with `>>>` and ends, as for doctest, at an empty line."""
    return _example.sub(_fence, text)


def _fence(found: re.Match[str]) -> str:
    indent = len(found["indent"])
    lines = [line[indent:] for line in found[0].rstrip("\n").split("\n")]
    return "\n".join(["", "```pycon", *lines, "```", ""])
