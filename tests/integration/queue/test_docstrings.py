"""The examples in the docstrings run, with a client and a queue that holds a message."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import conquiet.queue

MODULES = [
    "conquiet.queue",
    *(f"conquiet.queue.{module.name}" for module in pkgutil.iter_modules(conquiet.queue.__path__)),
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name, redis_client, make_queue):
    module = importlib.import_module(name)
    needed = {"client": redis_client}
    if name.endswith(".consumer"):
        needed["queue"] = make_queue()
        needed["queue"].enqueue({"order": 7})
    assert doctest.testmod(module, extraglobs=needed).failed == 0
