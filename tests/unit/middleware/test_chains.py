"""All of them in one chain: it runs, it survives faults, and a wrong order is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import permutations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from tests.unit.middleware.routers import order, placed, router_of

import conquiet.middleware
from conquiet.errors import ConfigError
from conquiet.memory import Inbox, Log, Outbox, Store, Transaction
from conquiet.middleware import (
    Correlation,
    DeadLetter,
    Deadline,
    Delay,
    Duplicate,
    FailAtRandom,
    JsonSchema,
    Metrics,
    Recover,
    Required,
    Retry,
    Subject,
    Tracing,
)
from conquiet.stage import stage_of
from conquiet.testing import deliver

IMPORT_AND_LIST = """
import json, sys
import conquiet.middleware
print(json.dumps([name for name in sys.modules if "." not in name]))
"""


def test_importing_them_imports_no_optional_package():
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST], capture_output=True, text=True, check=True
    )
    optional = {"prometheus_client", "opentelemetry", "jsonschema", "referencing"}
    assert not optional & set(json.loads(run.stdout))


def test_every_public_name_exists_once():
    names = conquiet.middleware.__all__
    assert len(names) == len(set(names))
    assert all(hasattr(conquiet.middleware, name) for name in names)


def test_under_faults_every_message_has_its_effect_exactly_once():
    dice = random.Random(7)
    store = Store()
    dead = Log()

    def handle(message):
        store.add("effects")
        return [placed(int(message.id))]

    router = router_of(
        handle,
        Duplicate(0.3, dice=dice),
        FailAtRandom(0.2, after=True, dice=dice),
        Metrics(CollectorRegistry()),
        Tracing(TracerProvider()),
        Recover(),
        DeadLetter(dead.sink()),
        Retry(2, first=0),
        Deadline(60),
        Required("source"),
        JsonSchema({"order": {"type": "object"}}),
        FailAtRandom(0.2, dice=dice),
        Transaction(store),
        Inbox("shop"),
        Outbox("events"),
        Correlation(),
        Subject("order_id"),
        FailAtRandom(0.05, dice=dice),
        Delay(0, sleep=lambda _: None),
    )
    waiting = [order(number) for number in range(200)]
    rounds = 0
    while waiting:
        rounds += 1
        assert rounds < 200
        waiting = deliver(router, *waiting).nacked
    assert rounds > 1
    assert store.get("effects") == 200
    assert sorted(int(event.subject) for event in store.outbox()) == list(range(200))
    assert all(event.correlationid == event.subject for event in store.outbox())
    assert len(dead) == 0


def staged():
    store = Store()
    return (
        DeadLetter(Log().sink()),
        Retry(),
        Transaction(store),
        Inbox("shop"),
        Outbox("events"),
        Correlation(),
    )


def test_of_all_orders_only_the_right_one_starts_and_the_others_show_it():
    right = staged()
    for chain in permutations(right):
        stages = [stage_of(item) for item in chain]
        if stages == sorted(stages):
            router_of(lambda _: None, *chain).start()
            continue
        with pytest.raises(ConfigError) as raised:
            router_of(lambda _: None, *chain).start()
        shown = "router.use(DeadLetter, Retry, Transaction, Inbox, Outbox, Correlation)"
        assert shown in str(raised.value)


@pytest.mark.parametrize("place", range(len(staged()) + 1))
@pytest.mark.parametrize(
    "make", [Deadline, Recover, Duplicate, lambda: Required("id"), lambda: JsonSchema({})]
)
def test_those_without_a_stage_fit_anywhere(make, place):
    chain = list(staged())
    chain.insert(place, make())
    assert deliver(router_of(lambda _: None, *chain), order()).acked
