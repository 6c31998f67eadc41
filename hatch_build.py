"""Prepares README.md for a package index, where a relative link or picture leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"<picture>.*?</picture>\n*|!\[[^]]*\]\((?!https?:)[^)]+\)\n*", re.DOTALL)
_CONTENTS = re.compile(r"^## Read on\n.*?(?=^Apache)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")

_DOCUMENTATION = """\
## Documentation

The source distribution has the pages that are named here (`docs/`), the examples and the
tests; `make docs` in it builds the site.

"""


def for_index(readme: str) -> str:
    """Return the text without pictures and contents; relative links become paths in the text."""
    text = _CONTENTS.sub(_DOCUMENTATION, _PICTURE.sub("", readme))
    return _LINK.sub(r"\1 (`\2`)", text)


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = for_index(Path(self.root, "README.md").read_text())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
