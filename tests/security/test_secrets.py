"""A password in a URL is never repeated: not in output, errors, tracebacks or logs."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import zygote

from conquiet import Message, Router, Worker, cli
from conquiet.errors import ConfigError
from conquiet.jsonlines import LinesSource
from conquiet.processes import run_processes
from conquiet.sql import Outbox, engine, schema

SECRET = "Zq9pa55w0rd"
REDIS = {
    "nobody listens": f"redis://app:{SECRET}@127.0.0.1:1/0",
    "over TLS": f"rediss://app:{SECRET}@127.0.0.1:1/0",
    "no port": f"redis://app:{SECRET}/x@127.0.0.1:6379/0",
    "a bracket": f"redis://app:[{SECRET}@127.0.0.1:6379/0",
    "an unknown option": f"redis://127.0.0.1:1/0?password={SECRET}&nosuch=1",
    "an unknown scheme": f"nosuch://app:{SECRET}@127.0.0.1:1/0",
    "no scheme": f"app:{SECRET}@127.0.0.1:1",
}
DATABASES = {
    "nobody listens": f"postgresql://app:{SECRET}@127.0.0.1:1/shop",
    "no port": f"postgresql://app:{SECRET}/x@127.0.0.1:5432/shop",
    "a port that is none": f"postgresql://app:{SECRET}@127.0.0.1:port/shop",
    "in the query": f"postgresql://127.0.0.1:1/shop?user=app&password={SECRET}",
    "an unknown option": f"postgresql://app:{SECRET}@127.0.0.1:1/shop?sslpassword={SECRET}&nosuch=1",
    "an unknown scheme": f"nosuch://app:{SECRET}@127.0.0.1:1/shop",
    "no scheme": f"app:{SECRET}@127.0.0.1:1",
}
OF_REDIS = [
    "streams list --broker URL",
    "streams trim orders --broker URL",
    "queue stats orders --broker URL",
    "queue pending orders billing --broker URL",
    "dead-letters list dead --broker URL",
    "dead-letters replay dead --all --yes --broker URL",
    "kombu inspect --broker URL",
    "kombu clean --broker URL",
    "trace a-1 --broker URL",
    "doctor --broker URL",
    "worker run tests.security.test_secrets:nothing --source URL?stream=a&group=b",
    "worker run tests.security.test_secrets:nothing --source URL",
    "worker run tests.security.test_secrets:nothing --sink URL",
    "worker run tests.security.test_secrets:nothing --processes 2 --source URL",
    "relay run --until-empty --database sqlite:///nothing.sqlite --sink URL",
    "relay run --print-settings --database sqlite:///nothing.sqlite --sink URL",
    "dashboard --print-settings --broker URL",
    "demo --no-spark --broker URL",
]
OF_DATABASES = [
    "outbox status --database URL",
    "outbox list --database URL",
    "outbox show a-1 --database URL",
    "outbox retry --all --database URL",
    "outbox prune --older-than 1d --yes --database URL",
    "outbox verify --database URL",
    "outbox migrate --database URL",
    "trace a-1 --database URL",
    "doctor --database URL",
    "relay run --until-empty --database URL --sink stdout:",
    "relay run --print-settings --database URL --sink stdout:",
    "dashboard --print-settings --database URL",
    "demo --no-spark --postgres URL",
    "pipeline reconcile marketplace.lake:pipeline --database URL",
]
SINKS = [
    f"https://app:{SECRET}@127.0.0.1:1/hook",
    f"https://{SECRET}@127.0.0.1:1/hook",
    f"https://127.0.0.1:1/hook?token={SECRET}",
    f"https://app:{SECRET}@127.0.0.1:port/hook",
    f"amqp://app:{SECRET}@127.0.0.1:1//orders",
    f"amqps://app:{SECRET}@127.0.0.1:port//orders",
    f"kafka://app:{SECRET}@127.0.0.1:1/orders?nosuch=1",
    f"kafka://127.0.0.1:1/orders?sasl.password={SECRET}",
    f"redis://app:{SECRET}@127.0.0.1:1/0",
    f"nosuch://app:{SECRET}@127.0.0.1",
]


def nothing():
    router = Router()

    @router.raw()
    def take(message: Message[bytes]) -> None: ...

    return router


WAITING = "--source URL?stream=a&group=b"
"""A worker that can start waits for its server, until it is stopped."""


def _cases(commands, urls):
    """Every command with every URL; in an ordinary run, the URL that libraries quote most."""
    for command in commands:
        for flaw, url in urls.items():
            if WAITING in command and flaw in ("nobody listens", "over TLS", "an unknown option"):
                continue
            is_quick = flaw == "no port" and not command.startswith(("demo", "doctor", "pipeline"))
            marks = () if is_quick else (pytest.mark.slow,)
            yield pytest.param(command, url, id=f"{command}, {flaw}", marks=marks)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A directory of its own, nothing set, nothing to read, and what was logged in sight."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    for name in [name for name in os.environ if name.startswith("CONQUIET_")]:
        monkeypatch.delenv(name)


def told(arguments, capfd, caplog):
    """Everything that a command says; it must fail, or have nothing to do, by itself."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
    output = capfd.readouterr()
    records = "".join(logging.Formatter().format(record) for record in caplog.records)
    return code, output.out + output.err, records


def check(command, url, capfd, caplog):
    arguments = [part.replace("URL", url) for part in command.split(" ")]
    # Of both forms the longer: --debug says all that is said without it.
    code, output, logs = told([*arguments, "--debug"], capfd, caplog)
    assert SECRET not in output, (command, url, output)
    assert SECRET not in logs, (command, url, logs)
    assert "--print-settings" in arguments or code in (1, 2), (command, url, code, output)


@pytest.mark.parametrize(("command", "url"), list(_cases(OF_REDIS, REDIS)))
def test_of_redis(command, url, capfd, caplog) -> None:
    check(command, url, capfd, caplog)


USAGE_ERRORS = [
    ["streams", "list", "--database", "URL"],  # unrecognized arguments
    ["streams", "list", "--database=URL"],
    ["streams", "URL"],  # an invalid choice
    ["URL"],
    ["outbox", "list", "--limit", "URL"],  # an invalid value
    ["outbox", "list", "--state", "URL", "--database", "sqlite:///x"],
    ["outbox", "status", "--table", "URL", "--database", "sqlite:///x"],  # a ConfigError
    ["relay", "run", "--health", "URL", "--database", "sqlite:///x"],
    ["relay", "run", "--batch-size", "URL", "--database", "sqlite:///x"],
    ["dashboard", "--port", "URL"],
    ["dashboard", "--public-url", "URL"],
    ["worker", "run", "URL"],
    ["pipeline", "show", "URL"],
]
QUOTED = {
    "a database": f"postgresql://a:{SECRET}@h/x",
    "no user": f"redis://:{SECRET}@h",
    "no host": f"redis://app:{SECRET}",
    "no scheme": f"app:{SECRET}@h:1",
    "a space": f"postgresql://a:b {SECRET} c@h/x",
    "a quote": f"postgresql://a:b'{SECRET}@h/x",
    "a parameter": f"kafka://h:1/t?sasl.password={SECRET}&x=1",
    "keywords of libpq": f"host=h user=a password={SECRET} dbname=x",
    "cut off": f"postgresql://{'a' * 50}:{SECRET}{'z' * 200}@h/x",
}


@pytest.mark.parametrize("url", QUOTED.values(), ids=QUOTED.keys())
@pytest.mark.parametrize("command", USAGE_ERRORS, ids=" ".join)
def test_of_wrong_usage(command, url, capfd, caplog) -> None:
    code, output, logs = told([part.replace("URL", url) for part in command], capfd, caplog)
    assert code == 2, output
    assert SECRET not in output + logs, output
    assert "error" in output


def test_an_error_about_settings_keeps_what_is_no_secret() -> None:
    text = "two servers: redis://app:***@one:6379/0 and 'kafka://a:9092,b:9092/t'; write redis://HOST:PORT/0"
    assert str(ConfigError(text)) == text


@pytest.mark.parametrize(("command", "url"), list(_cases(OF_DATABASES, DATABASES)))
def test_of_a_database(command, url, capfd, caplog) -> None:
    check(command, url, capfd, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("url", SINKS)
@pytest.mark.parametrize("verb", ["--until-empty", "--print-settings"])
def test_of_a_sink(verb, url, capfd, caplog, sqlite_url) -> None:
    """With an event that waits, so that the sink is really asked."""
    shop = engine(sqlite_url)
    schema.init(shop)
    with shop.begin() as connection:
        event = Message(b"{}", {"id": "1", "type": "sold", "source": "/shop"})
        Outbox("orders").add(connection, [event])
    shop.dispose()
    check(f"relay run {verb} --database {sqlite_url} --sink URL", url, capfd, caplog)


VARIABLES = {
    "CONQUIET_DATABASE_URL": DATABASES["nobody listens"],
    "CONQUIET_BROKER_URL": REDIS["nobody listens"],
    "CONQUIET_OUTBOX_SINK": SINKS[0],
    "CONQUIET_DASHBOARD_TOKEN": SECRET,
}


@pytest.mark.parametrize(
    "command",
    [
        *("relay run", "worker run", "outbox status", "outbox migrate", "streams list", "trace"),
        *("queue stats", "dead-letters list", "kombu inspect", "pipeline run", "dashboard"),
        *("doctor", "demo", "completion"),
    ],
)
def test_help_shows_nothing_of_the_environment(command, capfd, caplog, monkeypatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    code, output, _ = told([*command.split(), "--help"], capfd, caplog)
    assert code == 0
    assert "usage:" in output
    assert SECRET not in output


@pytest.mark.parametrize("command", ["relay run --print-settings", "dashboard --print-settings"])
@pytest.mark.parametrize("form", ["", " --json"])
def test_settings_of_the_environment_are_masked(command, form, capfd, caplog, monkeypatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    code, output, _ = told(f"{command}{form}".split(), capfd, caplog)
    assert code == 0
    assert "127.0.0.1" in output
    assert SECRET not in output


def test_metrics_of_a_relay_know_no_url(capfd, caplog, sqlite_url) -> None:
    from prometheus_client import generate_latest

    told(
        ["relay", "run", "--until-empty", "--database", sqlite_url, "--sink", SINKS[0]],
        capfd,
        caplog,
    )
    assert SECRET.encode() not in generate_latest()


def test_children_are_given_urls_by_a_pipe_and_not_by_their_command_line(tmp_path) -> None:
    """Whoever may call ps sees no more than what was typed."""
    titles = tmp_path / "titles"
    arguments = {"url": REDIS["nobody listens"], "into": str(titles)}
    assert run_processes("tests.security.test_secrets:tell_title", 1, 1.0, arguments=arguments) == 0
    assert "conquiet" in titles.read_text()
    assert SECRET not in titles.read_text()


def tell_title(url, into):
    """A worker that ends at once, having said how ps shows it."""
    assert SECRET in url
    Path(into).write_text(Path("/proc/self/cmdline").read_text())
    return Worker(LinesSource(io.BytesIO(), name="nothing"), nothing())


def test_a_worker_that_waits_for_its_server_does_not_say_the_password() -> None:
    url = f"{REDIS['nobody listens']}?stream=a&group=b"
    command = [sys.executable, "-m", "conquiet", "worker", "run", "--debug", "--source", url]
    worker = zygote.Popen(
        [*command, "tests.security.test_secrets:nothing"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert worker.stderr is not None
    said = [line for line, _ in zip(worker.stderr, range(3), strict=False)]
    worker.terminate()
    said += worker.stderr.readlines()
    worker.stderr.close()
    assert worker.wait(20) in (0, 1)
    assert "127.0.0.1:1" in "".join(said)
    assert SECRET not in "".join(said)
