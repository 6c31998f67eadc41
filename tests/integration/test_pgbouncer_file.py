"""deploy/pgbouncer.ini, in a real PgBouncer: relays and workers work through it by their URL."""

from __future__ import annotations

from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from sqlalchemy import text
from tests import needs
from tests.integration.sql.bouncer import PgBouncer

from conquiet import Message
from conquiet.cli import main
from conquiet.errors import ConfigError
from conquiet.sql import Outbox, schema
from conquiet.sql import engine as make_engine

FILE = Path(__file__).resolve().parents[2] / "deploy" / "pgbouncer.ini"


class FromTheFile(PgBouncer):
    """As the file says, but for addresses and passwords, which belong to the tests."""

    def _command(self, directory: Path, port: int) -> list[str]:
        command = super()._command(directory, port)
        of_the_tests = ConfigParser()
        of_the_tests.read(command[1])
        settings = ConfigParser()
        settings.read(FILE)
        settings["databases"] = of_the_tests["databases"]
        del settings["pgbouncer"]["auth_file"]
        for name in ("listen_port", "unix_socket_dir", "auth_type", "admin_users"):
            settings["pgbouncer"][name] = of_the_tests["pgbouncer"][name]
        with open(command[1], "w") as file:
            settings.write(file)
        return command


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    schema.init(database_url)
    with needs.found("PgBouncer", lambda: FromTheFile(database_url)) as bouncer:
        yield f"{bouncer.in_front_of(database_url)}?prepare_threshold=none"


def test_statements_are_not_prepared(url: str) -> None:
    engine = make_engine(url)
    with engine.begin() as transaction:
        for number in range(12):
            transaction.execute(text("SELECT CAST(:number AS int)"), {"number": number})
        assert transaction.scalar(text("SELECT count(*) FROM pg_prepared_statements")) == 0
    engine.dispose()


def test_a_relay_process_publishes_through_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(url)
    with engine.begin() as transaction:
        event = {"type": "sold", "source": "/shop"}
        Outbox("orders").add(transaction, [Message({"n": n}, event) for n in range(12)])
    options = ["--no-wakeup", "--health", "off", "--batch-size", "1", "--sink", "stdout:"]
    assert main(["relay", "run", "--database", url, "--until-empty", *options]) == 0
    with engine.connect() as looking:
        assert looking.scalar(text("SELECT count(*) FROM outbox WHERE published_at IS NULL")) == 0
    engine.dispose()
    assert capsys.readouterr().out.count('"type":"sold"') == 12


def test_a_threshold_that_is_none_is_refused_with_a_name() -> None:
    with pytest.raises(ConfigError, match=r"prepare_threshold='often'.*whole number"):
        make_engine("postgresql://app@localhost/shop?prepare_threshold=often")
