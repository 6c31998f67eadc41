"""The verdict on numbers: right as the generator foresaw them, and wrong whatever is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conquiet.errors import ConfigError
from marketplace.demo.settings import LAKE, REPORT, Settings, claim_folder
from marketplace.demo.verdict import Books, Log, Verdict, judge_services
from marketplace.demo.world import World, make_world

REPEATED = 3
Change = Callable[[Books, Log], object]


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(orders=25, seed=3)


def perfect(world: World) -> tuple[Books, Log]:
    """What would be found if everything went well."""
    books = Books(
        effects={message.id: 1.0 for message in world.commands}, events=world.events.copy()
    )
    for row in world.rows("fact_order"):
        amounts = row["collected_cents"], row["paid_cents"]
        books.orders[row["order_id"]] = (row["state"], *amounts)
    books.ids = {f"event-{number}" for number in range(world.events.total())}
    log = Log(commands=len(world.commands) + REPEATED, entries=world.events.total())
    log.first_seen = dict.fromkeys(books.ids | world.bad_ids, 1)
    return books, log


def judged(world: World, books: Books, log: Log) -> Verdict:
    verdict = Verdict()
    judge_services(verdict, world, books, log, REPEATED)
    return verdict


def test_all_is_well(world: World) -> None:
    assert judged(world, *perfect(world)).is_right


def change_order(books: Books, change: Callable[[str, int, int], tuple[str, int, int]]) -> None:
    id_ = next(id_ for id_, (state, *_) in books.orders.items() if state == "closed")
    books.orders[id_] = change(*books.orders[id_])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda b, g: b.effects.popitem(), "commands that took effect"),
        (lambda b, g: setattr(g, "commands", g.commands + 1), "duplicates dropped by the workers"),
        (lambda b, g: setattr(g, "dead_letters", 1), "commands refused"),
        (lambda b, g: b.orders.popitem(), "orders unlike the generator's"),
        (lambda b, g: b.orders.update(x=("closed", 1, 1)), "orders unlike the generator's"),
        (
            lambda b, g: change_order(b, lambda state, got, paid: (state, got + 1, paid)),
            "revenue, generator = books",
        ),
        (
            lambda b, g: change_order(b, lambda state, got, paid: ("canceled", got, paid)),
            "orders unlike the generator's",
        ),
        (lambda b, g: b.events.update(["order_created"]), "events in the outbox"),
        (
            lambda b, g: b.events.update({"order_created": 1, "cash_collected": -1}),
            "event types with a wrong count",
        ),
        (lambda b, g: g.first_seen.pop(min(b.ids)), "events published"),
        (lambda b, g: g.first_seen.pop(min(b.ids)), "events lost"),
        (lambda b, g: setattr(b, "unpublished", 1), "events lost"),
        (lambda b, g: g.first_seen.update(stranger=1), "bad events in the log"),
    ],
)
def test_whatever_differs_is_seen(world: World, change: Change, line: str) -> None:
    books, log = perfect(world)
    change(books, log)
    verdict = judged(world, books, log)
    assert not verdict.is_right
    assert line in [each.name for each in verdict.lines if not each.is_right]


def test_a_verdict_on_nothing_is_not_right() -> None:
    assert not Verdict().is_right


def test_the_same_seed_is_the_same_world(world: World) -> None:
    again = make_world(orders=25, seed=3)
    assert [message.id for message in again.commands] == [m.id for m in world.commands]
    assert again.bad_ids == world.bad_ids
    assert again.revenue_cents == world.revenue_cents > 0
    assert set(world.reasons) <= {
        *("unknown_type", "unknown_version", "null_data", "invalid_data", "broken_json"),
        "wrong_amounts",
    }


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="--to"):
        claim_folder(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConfigError, match="--to"):
        claim_folder(tmp_path / "thesis.txt")


def test_the_folder_of_an_earlier_demo_is_used_again_and_strange_files_stay(tmp_path) -> None:
    folder = claim_folder(tmp_path / "demo")
    (folder / REPORT).write_text("old")
    (folder / LAKE / "silver").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    claim_folder(tmp_path / "demo")
    assert not (folder / REPORT).exists()
    assert not (folder / LAKE).exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_too_few_orders_are_refused() -> None:
    with pytest.raises(ConfigError, match="--orders 5"):
        Settings(orders=5)
