"""The demo: the whole path of an event, with a crash in the middle, and the verdict on it.

    world ─▶ sender ─▶ workers ─▶ relays ─▶ pipeline ─▶ verdict ─▶ report

`run` runs it; `start` is the entry point of `conquiet demo`. Each process of the demo imports only
the modules that it needs, so nothing is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marketplace.demo.run import Progress
    from marketplace.demo.story import Story


def start(progress: Progress, when_done: Any, **settings: Any) -> Story:
    """Run the demo with these settings; the entry point `conquiet.demo` of this package."""
    from marketplace.demo.run import run_demo
    from marketplace.demo.settings import Settings

    return run_demo(Settings(**settings), progress, when_done=when_done)
