"""What the services refuse, and say about it; a refused command leaves everything as it was."""

from __future__ import annotations

from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import func, select

from conquiet import memory
from conquiet.events import InvalidEvent, schema
from conquiet.events.table import events_table
from conquiet.message import Message
from marketplace.catalog import CATALOG
from marketplace.service import (
    IllegalTransition,
    NotFound,
    Refused,
    WrongAmount,
    init,
    marketplace_router,
)
from marketplace.service.tables import ADS, LICENSES, ORDERS

ORDER, LINES, LEDGER = uuid4(), [uuid4(), uuid4()], [uuid4(), uuid4(), uuid4(), uuid4()]
EVENTS = events_table(CATALOG)
PAYMENT = {"payment_intent_id": uuid4(), "amount_cents": 2100}


class Service:
    """The router by itself: a command in, its result out."""

    def __init__(self, engine):
        self.engine = engine
        self.router = marketplace_router(engine)

    def send(self, type_, **fields):
        attributes = {"id": str(uuid4()), "type": type_, "source": "/test"}
        [result] = self.router.process([Message(msgspec.json.encode(fields), attributes)])
        if isinstance(result, Exception):
            raise result

    def place(self, **changed):
        lines = [
            {"line_item_id": id_, "product_id": uuid4(), "title": "Käse ☕", "category": "dairy"}
            | {"unit": "kg", "qty": 2, "unit_price_cents": 500, "discount_cents": 50}
            for id_ in LINES
        ]
        given = {"order_id": ORDER, "checkout_group_id": uuid4(), "buyer_store_id": uuid4()}
        given |= {"vendor_store_id": uuid4(), "order_number": 7, "currency": "USD"}
        given |= {"payment_method": "cash", "tax_cents": 150, "transport_fee_cents": 50}
        given |= {"total_cents": 2100, "postal_code": "60601", "lines": lines}
        self.send("place.order", **(given | changed))

    def go(self, *steps):
        for step in steps:
            self.send(step, order_id=ORDER)

    def status(self, table=ORDERS):
        with self.engine.connect() as connection:
            return connection.execute(select(table.c.status)).scalar()

    def types(self):
        query = select(EVENTS.c.event_type).order_by(EVENTS.c.created_at, EVENTS.c.id)
        with self.engine.connect() as connection:
            return list(connection.execute(query).scalars())


@pytest.fixture
def service(engine):
    return Service(engine)


def test_an_order_goes_its_whole_way(service):
    service.place()
    service.go("accept.lines", "mark.ready", "dispatch.order", "deliver.order")
    service.send("collect.cash", order_id=ORDER, ledger_event_id=LEDGER[0], **PAYMENT)
    service.send("settle.payment", order_id=ORDER, ledger_event_id=LEDGER[1], **PAYMENT)
    service.send("pay.out", order_id=ORDER, ledger_event_id=LEDGER[2], amount_cents=2100)
    service.go("close.order")
    assert service.status() == "closed"
    assert service.types() == [
        *("order_created", "notification_requested", "line_item_state_changed"),
        *("line_item_state_changed", "order_state_changed", "order_state_changed"),
        *("order_state_changed", "order_state_changed", "notification_requested"),
        *("cash_collected", "payment_settled", "vendor_payout_recorded", "order_state_changed"),
    ]


def test_a_rejected_line_lowers_what_is_due(service):
    service.place()
    service.send("accept.lines", order_id=ORDER, rejected=[LINES[0]])
    service.go("mark.ready", "dispatch.order", "deliver.order")
    assert service.status() == "delivered"
    with pytest.raises(WrongAmount, match="1150 cents are to be collected, not 2100"):
        service.send("collect.cash", order_id=ORDER, ledger_event_id=LEDGER[0], **PAYMENT)


def test_an_order_of_which_nothing_is_taken_is_rejected(service):
    service.place()
    service.send("accept.lines", order_id=ORDER, rejected=LINES)
    assert service.status() == "rejected"
    assert service.types()[-1] == "reservation_released"


@pytest.mark.parametrize(
    ("steps", "wrong", "says"),
    [
        ([], "dispatch.order", "created_pending and cannot become in_transit"),
        (["accept.lines"], "accept.lines", "accepted and cannot become accepted; only ready"),
        (["accept.lines"], "deliver.order", "cannot become delivered"),
        (["accept.lines", "mark.ready", "dispatch.order"], "cancel.order", "only delivered"),
        (["accept.lines"], "expire.order", "accepted and cannot become expired"),
    ],
)
def test_a_step_that_does_not_follow_is_refused_and_changes_nothing(service, steps, wrong, says):
    service.place()
    service.go(*steps)
    before = service.status(), service.types()
    with pytest.raises(IllegalTransition, match=says):
        service.send(wrong, order_id=ORDER, canceled_by="buyer")
    assert (service.status(), service.types()) == before


def test_an_order_does_not_expire_before_day_10(service):
    service.place(at="2026-03-01T12:00:00Z")
    with pytest.raises(IllegalTransition, match="expires at 2026-03-11T12:00:00"):
        service.send("expire.order", order_id=ORDER, at="2026-03-11T11:59:59Z")
    service.send("expire.order", order_id=ORDER, at="2026-03-11T12:00:00Z")
    assert service.status() == "expired"


def test_a_canceled_order_gives_its_goods_back_and_is_over(service):
    service.place()
    service.send("cancel.order", order_id=ORDER, canceled_by="buyer")
    assert service.types()[-2:] == ["order_canceled", "reservation_released"]
    with pytest.raises(IllegalTransition, match="nothing follows that"):
        service.go("accept.lines")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"total_cents": 2101}, "= 2100 cents, and the command says 2101"),
        ({"tax_cents": 0}, "= 1950 cents"),
    ],
)
def test_an_order_that_does_not_add_up_is_refused(service, changed, says):
    with pytest.raises(WrongAmount, match=says):
        service.place(**changed)
    assert service.types() == []


def test_a_discount_over_the_price_is_refused(service):
    line = {"line_item_id": LINES[0], "product_id": uuid4(), "title": "t", "category": "c"}
    line |= {"unit": "kg", "qty": 1, "unit_price_cents": 100, "discount_cents": 101}
    with pytest.raises(WrongAmount, match="cannot have a discount of 101"):
        service.place(lines=[line], total_cents=199)


def test_nul_in_a_title_is_refused_for_good(service):
    line = {"line_item_id": LINES[0], "product_id": uuid4(), "title": "a\0b", "category": "c"}
    line |= {"unit": "kg", "qty": 1, "unit_price_cents": 100}
    with pytest.raises(InvalidEvent, match="NUL"):
        service.place(lines=[line], total_cents=300)
    assert service.status() is None


def test_money_moves_once_and_only_when_it_is_due(service):
    service.place()
    with pytest.raises(IllegalTransition, match="money moves while it is delivered"):
        service.send("collect.cash", order_id=ORDER, ledger_event_id=LEDGER[0], **PAYMENT)
    service.go("accept.lines", "mark.ready", "dispatch.order", "deliver.order")
    with pytest.raises(IllegalTransition, match="its cash has not been collected yet"):
        service.send("settle.payment", order_id=ORDER, ledger_event_id=LEDGER[1], **PAYMENT)
    with pytest.raises(IllegalTransition, match="not been settled yet"):
        service.send("pay.out", order_id=ORDER, ledger_event_id=LEDGER[2], amount_cents=2100)
    with pytest.raises(IllegalTransition, match="2100 cents are due, 0 collected and 0 paid out"):
        service.go("close.order")
    service.send("collect.cash", order_id=ORDER, ledger_event_id=LEDGER[0], **PAYMENT)
    with pytest.raises(IllegalTransition, match="in the ledger already"):
        service.send("collect.cash", order_id=ORDER, ledger_event_id=LEDGER[3], **PAYMENT)


def test_cash_is_not_collected_for_an_order_by_ach(service):
    service.place(payment_method="ach")
    service.go("accept.lines", "mark.ready", "dispatch.order", "deliver.order")
    with pytest.raises(Refused, match="paid by ach, not in cash"):
        service.send("collect.cash", order_id=ORDER, ledger_event_id=LEDGER[0], **PAYMENT)


def test_an_order_is_placed_once_also_by_another_command(service):
    service.place()
    with pytest.raises(Refused, match="exists already"):
        service.place()


def test_what_is_not_known_yet_may_come_later(service):
    with pytest.raises(NotFound, match="send what creates it first"):
        service.go("mark.ready")
    service.place()
    with pytest.raises(Refused, match="has no line"):
        service.send("accept.lines", order_id=ORDER, rejected=[uuid4()])


def test_a_license_is_reviewed_once_and_can_be_submitted_again(service):
    license_ = {"license_id": UUID(int=7)}
    submitted = license_ | {"store_id": uuid4(), "license_type": "liquor"}
    service.send("submit.license", **submitted)
    with pytest.raises(IllegalTransition, match="only verified or rejected"):
        service.send("submit.license", **submitted)
    service.send("review.license", **license_, status="verified", expires_on="2027-01-01")
    with pytest.raises(IllegalTransition, match="only expired"):
        service.send("review.license", **license_, status="rejected")
    service.send("expire.license", **license_)
    service.send("submit.license", **submitted)
    assert service.status(LICENSES) == "pending_review"
    assert service.types() == ["license_status_changed"] * 4


def test_an_ad_lives_by_its_rules(service):
    ad = {"ad_id": UUID(int=8)}
    terms = {"vendor_store_id": uuid4(), "placement": "home_banner", "target_type": "store"}
    terms |= {"target_id": uuid4(), "bid_cents_cpm": 100, "daily_budget_cents": 5000}
    service.send("create.ad", **ad, **terms)
    with pytest.raises(IllegalTransition, match="only active"):
        service.send("pause.ad", **ad, cause="budget")
    service.send("activate.ad", **ad, cause="launched")
    service.send("update.ad", **ad, bid_cents_cpm=150)
    with pytest.raises(Refused, match="changes nothing"):
        service.send("update.ad", **ad, bid_cents_cpm=150)
    service.send("pause.ad", **ad, cause="budget")
    service.send("expire.ad", **ad, cause="end_date")
    with pytest.raises(IllegalTransition, match="create a new one"):
        service.send("update.ad", **ad, bid_cents_cpm=200)
    assert service.status(ADS) == "expired"
    assert service.types() == [
        *("ad_created", "ad_activated", "ad_updated", "ad_paused", "ad_expired"),
    ]


def test_a_day_is_counted_again_only_with_a_higher_revision(service):
    ad = {"ad_id": UUID(int=9)}
    terms = {"vendor_store_id": uuid4(), "placement": "home_banner", "target_type": "store"}
    terms |= {"target_id": uuid4(), "bid_cents_cpm": 100, "daily_budget_cents": 5000}
    day = ad | {"day": "2026-03-08", "timezone": "America/Chicago", "impressions": 5, "clicks": 1}
    with pytest.raises(NotFound):
        service.send("roll.up.ad", **day, spend_micros=5000, rollup_revision=1)
    service.send("create.ad", **ad, **terms)
    service.send("roll.up.ad", **day, spend_micros=5000, rollup_revision=1)
    service.send("roll.up.ad", **day, spend_micros=6000, rollup_revision=3)
    with pytest.raises(IllegalTransition, match="revision 2 already, or a higher one"):
        service.send("roll.up.ad", **day, spend_micros=5500, rollup_revision=2)
    assert service.types() == ["ad_created", *["ad_daily_rollup_ready"] * 2]


def test_an_upload_is_recorded_once(service):
    upload = {"media_id": uuid4(), "store_id": uuid4(), "kind": "product_photo"}
    upload |= {"mime_type": "image/jpeg", "size_bytes": 7}
    service.send("record.upload", **upload)
    with pytest.raises(Refused, match="exists already"):
        service.send("record.upload", **upload)
    assert service.types() == ["media_uploaded"]


def test_what_breaks_a_rule_goes_to_the_dead_letters_at_once_and_its_neighbours_do_not(engine):
    letters = memory.Log()
    router = marketplace_router(engine, dead_letters=letters.sink())
    bad = Message(msgspec.json.encode({"order_id": ORDER, "canceled_by": "b"}), {})
    license_ = {"license_id": uuid4(), "store_id": uuid4(), "license_type": "liquor"}
    good = Message(msgspec.json.encode(license_), {})
    bad.attributes |= {"id": "1", "type": "cancel.order", "source": "/t"}
    good.attributes |= {"id": "2", "type": "submit.license", "source": "/t"}
    Service(engine).place()
    Service(engine).go("accept.lines", "mark.ready", "dispatch.order")
    router.process([bad, good])
    [letter] = letters.replay()
    assert letter.id == "1"
    assert "cannot become canceled" in letter.attributes["deadreason"]
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(LICENSES)).scalar() == 1


def test_init_may_be_repeated_and_makes_the_locked_table(engine):
    init(engine)
    assert schema.verify(engine, CATALOG) == []
