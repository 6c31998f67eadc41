"""The events of a catalog, with the types that it declares."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from conquiet.errors import ConfigError
from conquiet.events import ActorRef, Envelope
from conquiet.spark import events
from conquiet.spark.catalog import ddl
from marketplace.catalog import CATALOG, Line, OrderCreated, ShipTo

ID = UUID(int=7)
AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


def order(number, **more):
    line = Line(ID, ID, "Beans", "food", "kg", 2, 300, 0, 600, "open")
    return OrderCreated(
        *(ID, ID, ID, ID, number, "EUR", "cash", 600, 0, 0, 0, 600),
        ship_to=ShipTo("1000"),
        lines=[line],
        **more,
    )


def publish(log, type, data, version=1):
    envelope = Envelope(
        version=version,
        event_id=ID,
        occurred_at=AT,
        actor=ActorRef("user", "u-1"),
        data=msgspec.Raw(msgspec.json.encode(data)),
    )
    fields = {"id": str(ID), "type": type, "source": "/shop", "specversion": "1.0"}
    log.client.xadd("orders", fields | {"data": msgspec.json.encode(envelope)})


def test_events_of_one_type_have_the_columns_of_their_struct(log) -> None:
    publish(log, "order_created", order(1, attribution={"ad": {"id": 5}}))
    publish(log, "order_expired", {"expired_at": "noon"})
    publish(log, "order_created", {"order_number": "one"})
    publish(log, "order_created", order(2), version=2)
    frame = events(log.spark, CATALOG, "order_created", url=log.url, streams="orders")
    good, bad = frame.collect()
    assert (good.version, good.actor.type, good.actor.storeId) == (1, "user", None)
    assert good.occurred_at == AT.replace(tzinfo=None)
    data = good.data
    assert (data.order_number, data.order_id, data.ship_to.postal_code) == (1, str(ID), "1000")
    assert [(line.title, line.qty) for line in data.lines] == [("Beans", 2)]
    assert data.attribution == '{"ad":{"id":5}}'
    assert bad.data is None
    assert "order_number" in bad._malformed
    assert b'"one"' in bytes(bad._raw)


def test_every_event_of_the_catalog_has_a_type_in_spark(log) -> None:
    for declared in CATALOG.declarations:
        frame = events(log.spark, CATALOG, declared.event_type, url=log.url, streams="none")
        names = [field.encode_name for field in msgspec.structs.fields(declared.data)]
        assert frame.schema["data"].dataType.names == names


def test_an_event_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ConfigError, match="no 'order_sold' version 0; its versions: none"):
        events(None, CATALOG, "order_sold")
    with pytest.raises(ConfigError, match="version 9; its versions: 1"):
        events(None, CATALOG, "order_created", version=9)


def test_types_of_msgspec_are_types_of_spark() -> None:
    assert ddl(dict[str, int] | None) == "MAP<STRING, BIGINT>"
    assert ddl(int | str) == "STRING COMMENT 'json'"
    with pytest.raises(ConfigError, match="list of values"):
        ddl(list[object])
