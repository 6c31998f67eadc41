"""Options of the log: what they may say, and that the page names them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet.errors import ConfigError
from conquiet.spark.log.options import READ_OPTIONS, ReadOptions
from conquiet.spark.payload import schema_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "spark.md"
PLAIN = {"url": "redis://host", "streams": "orders"}


def test_the_page_has_the_table_of_the_options() -> None:
    rows = [f"| `{name}` | {default} | {text} |" for name, (default, text) in READ_OPTIONS.items()]
    assert "\n".join(rows) in DOCUMENT.read_text()


@pytest.mark.parametrize(
    ("given", "streams"),
    [
        ("orders", ("orders",)),
        ("orders, pay:*,orders", ("orders", "pay:*")),
        ('["a,b", "c"]', ("a,b", "c")),
        ("[ab]*", ("[ab]*",)),
    ],
)
def test_streams_are_named_by_commas_or_as_json(given, streams) -> None:
    assert ReadOptions.of(PLAIN | {"streams": given}, streaming=True).streams == streams


def test_names_of_options_have_no_case() -> None:
    options = ReadOptions.of(PLAIN | {"MAXOFFSETSPERTRIGGER": "5"}, streaming=True)
    assert options.max_per_trigger == 5


def test_a_stream_starts_at_its_end_and_a_batch_at_the_beginning() -> None:
    assert ReadOptions.of(PLAIN, streaming=True).start.default == "latest"
    assert ReadOptions.of(PLAIN, streaming=False).start.default == "earliest"


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("Earliest", "earliest"),
        ("1700000000000-5", "1700000000000-5"),
        ("1700000000000", "1700000000000"),
        ("2023-11-14T22:13:20.0001Z", "1700000000001-0"),
        ("2023-11-14T23:13:20+01:00", "1700000000000-0"),
        ("1950-01-01T00:00:00Z", "0-0"),
    ],
)
def test_a_bound_is_a_word_an_id_or_a_time(text, bound) -> None:
    assert ReadOptions.of(PLAIN | {"startingOffsets": text}, streaming=True).start.default == bound


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"startingOffsets": "{", "streams": "a"}, "not JSON"),
        ({"startingOffsets": "99999999999999999999-0"}, "none of earliest, latest, an id"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "not both"),
        ({"endingOffsets": "latest"}, "a stream has no end"),
        ({"urlEnv": "X"}, "one of the options"),
        ({"discoverySeconds": "-1"}, "number of seconds"),
        ({"stream": "orders"}, "did you mean streams"),
    ],
)
def test_what_cannot_be_is_refused(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        ReadOptions.of(PLAIN | options, streaming=True)


def test_the_type_of_data_is_an_option() -> None:
    assert schema_of({}) == "BINARY"
    assert schema_of({"dataType": "STRING"}) == "STRING"
    assert schema_of({"schema": "n INT"}) == "STRUCT<n INT>"
