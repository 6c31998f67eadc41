"""A sink by its URL: imported when it is used, with a check that does not publish."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from conquiet.config import has_events_layout
from conquiet.errors import ConfigError, SinkUnavailable
from conquiet.registry import SINKS, OpenSink, connect_sink, open_database
from conquiet.relay.process import default_topic, sink_options
from conquiet.relay.settings import Settings, load


def settings(sink: str, **more: str) -> Settings:
    given = {"database": "sqlite:///shop.db", "sink": sink, "check_timeout_seconds": "0.2", **more}
    return load(given, environ={})


def opened_sink(settings: Settings, closing: ExitStack | None = None) -> OpenSink:
    return connect_sink(settings.sink, sink_options(settings, closing or ExitStack()))


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://127.0.0.1:1/events", "HttpSink"),
        ("kafka://127.0.0.1:1/events", "KafkaSink"),
        ("amqp://guest:guest@127.0.0.1:1//", "KombuSink"),
    ],
)
def test_a_sink_out_of_reach_opens_and_its_check_fails(url, kind) -> None:
    with ExitStack() as closing:
        opened = opened_sink(settings(url), closing)
        closing.callback(opened.sink.close)
        assert type(opened.sink).__name__ == kind
        assert opened.check is not None
        with pytest.raises(SinkUnavailable):
            opened.check()


def test_redis_is_the_default_and_is_the_broker() -> None:
    import redis

    broker = {"broker": "redis://127.0.0.1:1/0"}
    with ExitStack() as closing:
        opened = opened_sink(settings("redis:", **broker), closing)
        assert opened.check is not None
        with pytest.raises(redis.ConnectionError, match=r"127\.0\.0\.1:1"):
            opened.check()


def test_a_wrong_redis_url_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="partitions"):
        opened_sink(settings("redis://h/0?partitions=many"))


def test_an_option_that_redis_does_not_know_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"--sink .*'foo'"):
        opened_sink(settings("redis://h/0?foo=bar"))


def test_the_flag_or_variable_that_is_wrong_is_the_one_that_is_named() -> None:
    with pytest.raises(ConfigError, match="--broker http://h: unknown scheme"):
        opened_sink(settings("redis:", broker="http://h"))
    environ = {"CONQUIET_DATABASE_URL": "sqlite:///shop.db", "CONQUIET_BROKER_URL": "http://h"}
    with pytest.raises(ConfigError, match="CONQUIET_BROKER_URL http://h: unknown scheme"):
        opened_sink(load({}, environ=environ))


@pytest.mark.parametrize(
    ("database", "says"),
    [
        ("sqlite:///typo.db", "conquiet outbox migrate would create it"),
        ("sqlite://", "needs a SQLite file"),
    ],
)
def test_a_file_that_is_not_there_is_not_made(database, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        open_database(database, "CONQUIET_DATABASE_URL")
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_is_named_with_the_command_that_brings_it(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"conquiet\[redis\]"):
        opened_sink(settings("redis:"))


def test_a_connection_to_postgresql_does_not_wait_for_ever() -> None:
    engine = open_database("postgresql://h/d?connect_timeout=1")
    _, options = engine.dialect.create_connect_args(engine.url)
    assert options["connect_timeout"] == "1"
    engine.dispose()


def test_the_layout_is_told_by_the_name() -> None:
    assert has_events_layout("outbox_events")
    assert has_events_layout("sales.outbox_events")
    assert not has_events_layout("outbox")


@pytest.mark.parametrize(
    "sink",
    [
        "redis://u:s3/cret@h/0",
        "redis://u:[s3cret@h/0",
        "redis:u:s3cret@h",
        "redis://u:s3cret@h/0?unheard_of=1",
        "rediss://u:s3cret@h/0?ssl_cert_reqs=perhaps",
        "amqp://u:s3/cret@h/v",
        "http://u:s3/cret@h/",
        "http://u:s3\u2100cret@h/",
        "kafka://u:[s3cret@h/t",
        "kafka://u:s3\u2100cret@h/t",
        "pubsub://u:[s3cret@h/t",
    ],
)
def test_what_is_wrong_with_a_url_is_told_without_its_password(sink) -> None:
    with pytest.raises(ConfigError) as caught:
        opened_sink(settings(sink))
    assert "s3" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("sink", ["kafka://127.0.0.1:1/sales", "pubsub://shop/sales"])
def test_a_topic_in_the_url_of_the_sink_is_the_topic(sink) -> None:
    assert default_topic(settings(sink)) == "sales"
    assert default_topic(settings(sink, topic="sales")) == "sales"
    with pytest.raises(ConfigError, match="two topics: 'sales' in --sink, 'other' by --topic"):
        default_topic(settings(sink, topic="other"))


def test_a_path_that_is_no_topic_is_none() -> None:
    assert default_topic(settings("amqp://h/vhost")) == "domain-events"
    assert default_topic(settings("kafka://h")) == "domain-events"


def test_every_scheme_of_the_message_is_known() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("ftp://h")
    for scheme in SINKS:
        assert {"-": "or -", "kombu+": "kombu+…:"}.get(scheme, f"{scheme}:") in str(caught.value)
