"""Settings of the relay: where they come from, and what a wrong one says."""

from __future__ import annotations

import pytest

from conquiet.cli import main
from conquiet.errors import ConfigError
from conquiet.relay.settings import SETTINGS, Settings, load
from conquiet.secret import mask

DATABASE = {"CONQUIET_DATABASE_URL": "postgresql://app:s3cret@db/shop"}


def test_the_defaults_are_those_of_the_ticket() -> None:
    settings = load(environ=DATABASE)
    assert (settings.batch_size, settings.poll_ms, settings.max_attempts) == (50, 500, 10)
    assert settings.idempotency_ttl_hours == 168
    assert settings.topic == "domain-events"
    assert settings.health == ("127.0.0.1", 8081)


def test_a_flag_beats_a_variable_which_beats_the_file(tmp_path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text("[relay]\nbatch_size = 7\npoll_ms = 70\nmax_attempts = 3\nordered = true\n")
    environ = {
        **DATABASE,
        "CONQUIET_OUTBOX_PUBLISH_BATCH_SIZE": "8",
        "CONQUIET_OUTBOX_PUBLISH_POLL_MS": "80",
        "CONQUIET_CONFIG": str(file),
    }
    settings = load({"batch_size": "9"}, environ)
    assert (settings.batch_size, settings.poll_ms, settings.max_attempts) == (9, 80, 3)
    assert settings.ordered is True
    assert settings.origins["batch_size"] == "--batch-size"
    assert settings.origins["poll_ms"] == "CONQUIET_OUTBOX_PUBLISH_POLL_MS"
    assert settings.origins["max_attempts"] == f"max_attempts of {file}"
    assert settings.origins["topic"] == "default"


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert load(environ={**DATABASE, "CONQUIET_OUTBOX_MAX_ATTEMPTS": ""}).max_attempts == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "0"),
        ("batch_size", "many"),
        ("batch_size", "²"),
        ("poll_ms", "-1"),
        ("max_attempts", "1.5"),
        ("idempotency_ttl_hours", "0"),
        ("ordered", "maybe"),
        ("sink", "ftp://host"),
        ("sink", "redis"),
        ("database", "mysql://h/d"),
        ("table", 'x"; DROP'),
        ("health", "8081"),
        ("health", "host:99999"),
        ("log_format", "xml"),
        ("topic", "x" * 256),
    ],
)
def test_a_wrong_value_names_variable_value_and_what_is_allowed(name, value) -> None:
    [setting] = [setting for setting in SETTINGS if setting.name == name]
    with pytest.raises(ConfigError) as caught:
        load(environ={**DATABASE, setting.variable: value})
    text = str(caught.value)
    assert setting.variable in text
    assert value[:50] in text
    assert setting.allowed in text


def test_a_wrong_url_is_told_without_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={"CONQUIET_DATABASE_URL": "mysql://u:top-secret@h/d"})
    assert "top-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "content", ["nonsense", "[relay]\nbatch = 5", "relay = 5", "[relay]\nbatch_size = [5]"]
)
def test_a_wrong_file_is_named(tmp_path, content) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"relay\.toml"):
        load(environ=DATABASE, file=str(file))


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load(environ=DATABASE, file=str(tmp_path / "none.toml"))


def test_what_is_printed_has_every_setting_and_no_secret() -> None:
    sink = "amqp://app:hush@mq/?password=hush2"
    lines = load(environ={**DATABASE, "CONQUIET_OUTBOX_SINK": sink}).list_lines()
    assert [line.split()[0] for line in lines] == [setting.variable for setting in SETTINGS]
    text = "\n".join(lines)
    assert "s3cret" not in text
    assert "hush" not in text
    assert "postgresql://app:***@db/shop" in text


def test_a_batch_must_have_ended_before_the_process_takes_it_for_stuck() -> None:
    given = {"publish_timeout_seconds": "3", "stuck_after_seconds": "12"}
    assert load(given, environ=DATABASE).publish_timeout_seconds == 3
    with pytest.raises(ConfigError, match=r"--stuck-after-seconds: 11 is less .* set it to 12"):
        load({**given, "stuck_after_seconds": "11"}, environ=DATABASE)


def test_every_setting_is_a_field_of_the_settings() -> None:
    fields = set(Settings.__dataclass_fields__) - {"texts", "origins"}
    names = {setting.name for setting in SETTINGS} - {"from"}  # no name of Python
    assert fields == names | {"read_from"}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("kafka://h/?sasl.password=x&a=b", "kafka://h/?sasl.password=***&a=b"),
        ("sqlite:///shop.db", "sqlite:///shop.db"),
        ("amqp://u:p@ss/w@h/v", "amqp://u:***@h/v"),
        ("https://t0ken@h/x", "https://***@h/x"),
        ("https://h/x?a=1&access_token=t0ken", "https://h/x?a=1&access_token=***"),
        ("postgresql://app@h/d?sslmode=require", "postgresql://app@h/d?sslmode=require"),
        ("postgresql://app:my pass@h/db", "postgresql://app:***@h/db"),
        ("postgresql://h/db?password=abc def&a=b", "postgresql://h/db?password=***&a=b"),
        ("app:secretpw@h/db", "app:***@h/db"),
        ("postgresql://app@server:pw@h/db", "postgresql://app@server:***@h/db"),
        ("postgresql://us/er:pw@h/db", "postgresql://us/er:***@h/db"),
        ("postgresql://app:p\nw@h/db", "postgresql://app:***@h/db"),
        ("redis:user:pw@h", "redis:***@h"),
        ("https://tok/en@h/x", "https://***@h/x"),
        ("https://h/x?PASSWORD=pw;pw", "https://h/x?PASSWORD=***"),
        ("https://h/x?code=c0de", "https://h/x?code=***"),
        ("kafka://h/?sasl.jaas.config=a b", "kafka://h/?sasl.jaas.config=***"),
    ],
)
def test_mask(url, shown) -> None:
    assert mask(url) == shown


def test_print_settings_ends_at_once(monkeypatch, capsys) -> None:
    monkeypatch.setenv("CONQUIET_DATABASE_URL", DATABASE["CONQUIET_DATABASE_URL"])
    assert main(["relay", "run", "--print-settings"]) == 0
    assert "CONQUIET_OUTBOX_MAX_ATTEMPTS" in capsys.readouterr().out
    assert main(["relay", "run", "--print-settings", "--json"]) == 0
    assert '"batch_size": "50"' in capsys.readouterr().out
    assert main(["relay", "run", "--poll-ms", "soon"]) == 2
    assert "--poll-ms: 'soon' is not" in capsys.readouterr().err
