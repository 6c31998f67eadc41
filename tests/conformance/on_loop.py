"""Run the tests of a contract over a client of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from conquiet import bridge
from conquiet.testing.contracts import inbox, source


class OnLoop:
    """A binding whose client or engine an event loop owns; tests wait for it by `bridge`.

    A test runs in a thread, since it may block, and so do the threads that it starts.
    """

    client: Any
    loop: asyncio.AbstractEventLoop

    async def disconnect(self) -> None:
        await self.client.aclose()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in dir(cls):
            if name.startswith("test_"):
                setattr(cls, name, _on_loop(getattr(cls, name)))

    @pytest.fixture(autouse=True)
    def _bridge_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def start(target: Callable[..., Any], args: Any = (), **options: Any) -> threading.Thread:
            def run() -> None:
                call = bridge.run_in_thread(target, *args)
                asyncio.run_coroutine_threadsafe(call, self.loop).result()

            return threading.Thread(target=run, **options)

        names = SimpleNamespace(Thread=start, Event=threading.Event)
        for module in (inbox, source):
            monkeypatch.setattr(module, "threading", names)


def _on_loop(test: Callable[..., None]) -> Callable[..., None]:
    if hasattr(test, "__wrapped__"):  # by a base class
        return test

    @wraps(test)
    def on_loop(self: Any, *args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            try:
                await bridge.run_in_thread(test, self, *args, **kwargs)
            finally:
                await self.disconnect()

        asyncio.run(main())

    return on_loop
