"""Checks of the built site, for `mkdocs build --strict`: each warning fails it."""

from __future__ import annotations

import logging
import re
from typing import Any

logger = logging.getLogger("mkdocs.hooks.site")

# What a browser fetches by itself; a link that a reader may follow is another matter.
_fetched = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\bsrc=["']?(?:https?:)?//[^"'> ]+"""
    # A canonical link is a name, and so are those of the pages before and after.
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|prev|next)\b)"""
    r"""[^>]*?\bhref=["']?(?:https?:)?//[^"'> ]+"""
    r"""|@import[^;]*//[^;]*|url\(["']?(?:https?:)?//[^)]+\)"""
)
_lost_list = re.compile(r"<p>(?:[^<]|<(?!/p>))*?\n(?:[-*]|1\.) ")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    for found in _fetched.findall(output):
        logger.warning("%s fetches from elsewhere: %s", page.file.src_uri, found)
    for found in _lost_list.findall(output):
        logger.warning("%s: a list needs an empty line before it: %s", page.file.src_uri, found)
    return output
