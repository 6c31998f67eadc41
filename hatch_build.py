"""Prepares README.md for a package index, where a relative link or picture leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"<picture>.*?</picture>\n*|!\[[^]]*\]\((?!https?:)[^)]+\)\n*", re.DOTALL)
_LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)[^)]+\)")


def for_index(readme: str) -> str:
    """Return the text without pictures, and with the words of relative links alone."""
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = for_index(Path(self.root, "README.md").read_text())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
