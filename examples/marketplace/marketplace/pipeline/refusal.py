"""Refusal: why an entry cannot be taken, as a code that a program can read; the first that holds.

The checks are those of "What is refused" in docs/marketplace.md, in that order.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as f

from conquiet.events.catalog import Catalog, Declaration
from marketplace.pipeline.payloads import declarations, is_valid, moment
from marketplace.pipeline.telemetry import KINDS, TELEMETRY_TOPIC

REASONS = (
    "malformed_entry",
    "broken_json",
    "bad_envelope",
    "unknown_type",
    "unknown_version",
    "null_data",
    "invalid_data",
    "wrong_amounts",
)


def is_telemetry(stream: Column) -> Column:
    """Whether a stream is the topic of telemetry, or a partition of it."""
    return f.split_part(stream, f.lit(":{"), f.lit(1)) == TELEMETRY_TOPIC


def reason(catalog: Catalog) -> Column:
    """Why a row is refused, or null; it has the columns of the log, `text` and `envelope`."""
    envelope, kind = f.col("envelope"), f.col("type")
    data, version = envelope["data"], envelope["version"]
    known = declarations(catalog)
    types = sorted({one.event_type for one in known})
    is_created = kind == "order_created"
    checks = {
        "malformed_entry": f.col("malformed").isNotNull() | _empty("event_id") | _empty("type"),
        "broken_json": ~_is_one_object(f.col("text")),
        "bad_envelope": ~_is_envelope(envelope),
        "unknown_type": ~(kind.isin(*types) & (kind.isin(*KINDS) == is_telemetry(f.col("stream")))),
        "unknown_version": ~reduce(Column.__or__, [_is(one, kind, version) for one in known]),
        # Data of another kind is null to the schema as well; seldom enough to be looked at again.
        "null_data": data.isNull() & f.get_json_object("text", "$.data").isNull(),
        "invalid_data": ~_fits_its_type(known, kind, version, data),
        "wrong_amounts": is_created & ~adds_up(data),
    }
    found = f.when(checks[REASONS[0]], REASONS[0])
    for name in REASONS[1:]:
        found = found.when(f.coalesce(checks[name], f.lit(True)), name)
    return found


def _empty(name: str) -> Column:
    return f.coalesce(f.col(name), f.lit("")) == ""


def _is_one_object(text: Column) -> Column:
    """Whether a text is an object of JSON and nothing else: Spark reads the first value of a text,
    whatever comes after it, but not in an array."""
    trimmed = f.btrim(text, f.lit(" \t\r\n"))
    values = f.json_array_length(f.concat(f.lit("["), trimmed, f.lit("]")))
    return trimmed.startswith("{") & trimmed.endswith("}") & (values == 1)


def _is_envelope(envelope: Column) -> Column:
    return (
        (envelope["version"] >= 1)
        & (envelope["eventId"] == f.col("event_id"))
        & moment(envelope["occurredAt"]).isNotNull()
    )


def _is(one: Declaration, kind: Column, version: Column) -> Column:
    return (kind == str(one.event_type)) & (version == one.version)


def _fits_its_type(known: list[Declaration], kind: Column, version: Column, data: Column) -> Column:
    found = f.when(f.lit(False), f.lit(False))
    for one in known:
        found = found.when(_is(one, kind, version), is_valid(data, one.data))
    return found


def adds_up(data: Column) -> Column:
    """Whether the money of an `order_created` follows the rules; what overflows does not."""
    lines = data["lines"]

    def gross(line: Column) -> Column:
        return f.try_multiply(line["qty"], line["unit_price_cents"])

    def line_is_right(line: Column) -> Column:
        net = f.try_subtract(gross(line), line["discount_cents"])
        return f.coalesce(net == line["line_total_cents"], f.lit(False))

    subtotal = _total(f.transform(lines, gross))
    discounts = _total(f.transform(lines, lambda line: line["discount_cents"]))
    net = f.try_subtract(data["subtotal_cents"], data["discounts_cents"])
    total = f.try_add(f.try_add(net, data["tax_cents"]), data["transport_fee_cents"])
    right = (
        f.forall(lines, line_is_right)
        & (subtotal == data["subtotal_cents"])
        & (discounts == data["discounts_cents"])
        & (total == data["total_cents"])
    )
    return f.coalesce(right, f.lit(False))


def _total(values: Column) -> Column:
    return f.aggregate(values, f.lit(0).cast("bigint"), lambda sum, value: f.try_add(sum, value))
