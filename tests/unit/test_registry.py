"""Sources and sinks by their URL."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from conquiet.errors import ConfigError
from conquiet.message import Message
from conquiet.redis import StreamSink
from conquiet.registry import (
    SinkOptions,
    SourceOptions,
    connect_sink,
    connect_source,
    open_sink,
    refuse_one_file_for_both,
)
from conquiet.relay.sinks import HttpSink, KafkaSink, KombuSink, PubSubSink

LINE = b'{"specversion": "1.0", "id": "1", "type": "t", "source": "/s"}\n'


def test_a_missing_package_is_told_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "conquiet.redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'conquiet\[redis\]'"):
        connect_source("redis://localhost?stream=x&group=y", SourceOptions())


@pytest.mark.parametrize(
    "options", [SourceOptions(max_line_bytes=9), SourceOptions(dead_letters=Path("x"))]
)
def test_streams_do_not_take_the_options_of_lines(options) -> None:
    with pytest.raises(ConfigError, match="are for JSON lines"):
        connect_source("redis://localhost?stream=x&group=y", options)


@pytest.mark.parametrize("prefix", ["file:", "file://"])
def test_a_file_is_read_by_its_path(tmp_path, prefix) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINE)
    with ExitStack() as files:
        source = connect_source(f"{prefix}{tmp_path}/in.jsonl", SourceOptions(closing=files))
        [message] = source.read(10, 1)
    assert message.id == "1"


def test_a_file_sink_appends(tmp_path) -> None:
    (tmp_path / "out.jsonl").write_bytes(LINE)
    with ExitStack() as files:
        sink = connect_sink(f"file:{tmp_path}/out.jsonl", SinkOptions(closing=files)).sink
        sink.publish([Message(b"1", {"id": "2", "type": "t", "source": "/s"})])
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://localhost", "say which stream, as in"),
        ("redis://localhost?stream=x&group=y&partitions=two", "not a whole number"),
        ("redis://localhost/x?stream=x&group=y&timeout=soon", "timeout"),
        ("orders.jsonl", "write file:orders.jsonl"),
        ("pigeon:x", "choose one of"),
        ("file:", "names no file"),
        ("file://host/path", "names no file"),
        ("file:/nonexistent/x", "No such file"),
        ("file:/", "Is a directory"),
    ],
)
def test_addresses_that_cannot_work_say_how_to_write_them(url, says) -> None:
    with pytest.raises(ConfigError, match=says):
        connect_source(url, SourceOptions())
    with ExitStack() as files, pytest.raises(ConfigError, match=says):
        connect_sink(url, SinkOptions(needs_stream=True, closing=files))


@pytest.mark.parametrize("url", ["redis:?stream=x", "redis://localhost?stream=x"])
def test_a_stream_without_a_group_asks_for_the_group(url) -> None:
    with pytest.raises(ConfigError, match=r"--source .*which group, as in \?stream=x&group="):
        connect_source(url, SourceOptions())


def test_one_file_for_both_ends_would_never_end(tmp_path) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(ConfigError, match="one file"):
        refuse_one_file_for_both(f"file:{tmp_path}/x", f"file:{tmp_path}/link")
    refuse_one_file_for_both(f"file:{tmp_path}/x", f"file:{tmp_path}/new")


def test_other_distributions_add_schemes_by_entry_points(monkeypatch) -> None:
    class Entry:
        name = "pigeon"

        @staticmethod
        def load():
            return lambda url, **options: (url, options)

    monkeypatch.setattr("conquiet.registry._entries", lambda group: {"pigeon": Entry})
    assert open_sink("pigeon://roof", topic="t") == ("pigeon://roof", {"topic": "t", "timeout": 10})
    source = connect_source("pigeon://roof", SourceOptions(max_attempts=2))
    assert source == ("pigeon://roof", {"max_attempts": 2})


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://localhost:6379/0", StreamSink),
        ("rediss://localhost:6379/0", StreamSink),
        ("pubsub://shop/orders?ordered=true&timeout=3", PubSubSink),
        ("kafka://localhost:9/orders?linger.ms=5", KafkaSink),
        ("amqp://guest:guest@localhost//?queues=a,b&mandatory=false", KombuSink),
        ("kombu+memory://?queues=events", KombuSink),
        ("http://localhost:1/events", HttpSink),
        ("https://localhost/events?tenant=7", HttpSink),
    ],
)
def test_a_url_names_a_sink(url: str, kind: type) -> None:
    sink = open_sink(url, topic="orders")
    assert type(sink) is kind
    sink.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("carrier-pigeon://secret@roof", "choose one of redis:"),
        ("nonsense", "choose one of redis:"),
        ("pubsub://shop/orders?ordered=perhaps", "choose true or false"),
        ("pubsub://shop/orders?colour=red", "'colour'"),
        ("pubsub:///orders", "needs a project"),
        ("kafka://localhost/orders?timeout=soon", "number of seconds"),
        ("kafka://localhost/orders?timeout=0", "above 0"),
        ("kafka://localhost/orders?timeout=inf", "3600 at most"),
        ("amqp://localhost?timeout=nan", "3600 at most"),
        ("http://to%0aken@host/", "'authorization'"),
        ("kafka://localhost/orders?colour=red", "colour"),
        ("kafka://localhost/orders?acks=0", "'acks'"),
        ("kafka:///orders", "needs servers"),
        ("kombu+memory://", "queues"),
        ("kombu+pigeon://roof?queues=a", "does not understand"),
        ("http:///path", "https://host/path"),
        ("http://host:port/", "URL of an HTTP sink"),
        ("http://[::1/", "URL of an HTTP sink"),
        ("kafka://[::1/", "URL of the sink"),
    ],
)
def test_a_url_that_names_none_says_what_to_change_and_no_secret(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sink(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module", "command"),
    [
        ("pubsub://shop/orders", "google.pubsub_v1", "pip install 'conquiet[pubsub]'"),
        ("kafka://localhost/orders", "confluent_kafka", "pip install 'conquiet[kafka]'"),
        ("amqp://localhost", "kombu", "pip install 'conquiet[amqp]'"),
        ("redis://localhost", "redis", "pip install 'conquiet[redis]'"),
    ],
)
def test_a_missing_package_of_a_sink_is_named_with_the_command_that_installs_it(
    url: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        open_sink(url)
    assert command in str(caught.value)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "say which queue, as in"),
        ("?queue=orders&speed=high", "unknown setting 'speed'"),
        ("?queue=orders&prefetch=many", "must be a whole number"),
        ("?queue=orders&prefetch=0", "from 1 to 65535"),
        ("?queue=orders&queue_type=lazy", "'quorum' or 'classic'"),
        ("?queue=orders&queue=bills", "has 'queue' twice"),
        ("?queue=orders&heartbeat=0", "from 1 to 65535 seconds"),
        ("?queue=orders&heartbeat=inf", "from 1 to 65535 seconds"),
        ("?queue=orders&declare=maybe", "choose true or false"),
    ],
)
def test_parameters_of_an_amqp_source_that_are_missing_or_wrong_are_named(query, says) -> None:
    with pytest.raises(ConfigError, match=says):
        connect_source(f"amqp://guest:guest@localhost/{query}", SourceOptions())


def test_brokers_do_not_take_the_options_of_lines() -> None:
    with pytest.raises(ConfigError, match="are for JSON lines"):
        connect_source("amqp://localhost?queue=x", SourceOptions(dead_letters=Path("x")))
