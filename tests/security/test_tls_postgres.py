"""PostgreSQL on another host is verified, by every door, unless its URL says otherwise.

`hostaddr` leads a name to the loopback: libpq verifies the name, and so does conquiet's default.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl

import psycopg
import pytest
from pyspark.sql.types import StructType
from sqlalchemy import make_url, text
from tests import needs
from tests.security.certificates import certificate

from conquiet import Message, cli, embedded
from conquiet.cli.doctor import _check_verification
from conquiet.errors import ConfigError, ConquietError, StoreError
from conquiet.spark.database import Database, begin
from conquiet.spark.upsert.postgres import PostgresTarget
from conquiet.spark.upsert.target import UpsertOptions
from conquiet.sql import Outbox, OutboxLog, engine, schema
from conquiet.sql.dialect import async_engine
from conquiet.sql.tls import verify_server, verify_server_text
from marketplace.demo.servers import _own_schema

REFUSED = "certificate verify failed"
ADVICE = "sslmode=prefer gives it up"


@pytest.fixture(scope="module")
def secure_postgres(tmp_path_factory):
    """A PostgreSQL that speaks TLS, as db.example; its URL there, and its certificate.

    Debian's, since that of the wheel is built without TLS.
    """
    with needs.found(
        "PostgreSQL with TLS", lambda: embedded.postgres(flavour="debian", private=True)
    ) as server:
        made, key = certificate(tmp_path_factory.mktemp("tls"), "DNS:db.example")
        owner = (server.directory / "data").stat()
        for file in (made, key):
            own = server.directory / "data" / file.name
            shutil.copy(file, own)
            own.chmod(0o600)
            os.chown(own, owner.st_uid, owner.st_gid)
        with psycopg.connect(server.url, autocommit=True) as connection:
            for name, value in {
                "ssl_cert_file": made.name,
                "ssl_key_file": key.name,
                "ssl": "on",
            }.items():
                connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
            connection.execute("SELECT pg_reload_conf()")
        schema.init(server.url)
        yield server.url.replace("127.0.0.1", "db.example") + "?hostaddr=127.0.0.1", made


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # may have a root.crt


def read(url):
    made = engine(url)
    try:
        return OutboxLog(made).read()
    finally:
        made.dispose()


def test_a_certificate_that_nobody_vouches_for_is_refused_by_every_door(
    secure_postgres, caplog, capsys
) -> None:
    url, _ = secure_postgres
    with pytest.raises(ConquietError, match=f"{REFUSED}.*{ADVICE}"):
        read(url)
    with pytest.raises(StoreError, match=f"{REFUSED}.*{ADVICE}"), begin(Database.at(url)):
        pass
    options = UpsertOptions.of({"url": url, "table": "orders", "keys": "id"}, ["id"])
    with pytest.raises(StoreError, match=f"{REFUSED}.*{ADVICE}"):
        PostgresTarget(Database.at(url), options).check(StructType().add("id", "integer"))
    with pytest.raises(ConfigError, match=REFUSED), _own_schema(url):
        pass
    for command in (
        *(["outbox", "status", "--database", url], ["outbox", "migrate", "--database", url]),
        ["relay", "run", "--until-empty", "--database", url, "--sink", "stdout:"],
        ["doctor", "--database", url],
    ):
        caplog.clear()
        assert cli.main(command) == 1, command
        said = capsys.readouterr()
        assert REFUSED in said.out + said.err + caplog.text, command


def test_with_its_authority_it_is_taken_by_every_door(secure_postgres) -> None:
    url, trusted = secure_postgres
    known = f"{url}&sslrootcert={trusted}"
    made = engine(known)
    with made.begin() as connection:
        Outbox("orders").add(
            connection, [Message(b"{}", {"id": "1", "type": "sold", "source": "/shop"})]
        )
    made.dispose()
    assert len(read(known)) == 1
    with begin(Database.at(known)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        assert cursor.fetchone() == (True,)
    with _own_schema(known) as inside, psycopg.connect(inside) as connection:
        assert connection.pgconn.ssl_in_use


def test_a_certificate_of_another_name_is_refused(secure_postgres) -> None:
    url, trusted = secure_postgres
    elsewhere = f"{url}&sslrootcert={trusted}".replace("db.example", "shop.example")
    with pytest.raises(ConquietError, match=f'does not match host name "shop.example".*{ADVICE}'):
        read(elsewhere)
    with (
        pytest.raises(StoreError, match="does not match host name"),
        begin(Database.at(elsewhere)),
    ):
        pass


def test_who_says_a_mode_gets_it(secure_postgres, monkeypatch) -> None:
    url, _ = secure_postgres
    assert read(f"{url}&sslmode=require") is not None
    monkeypatch.setenv("PGSSLMODE", "prefer")
    assert read(url) is not None
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    with pytest.raises(ConquietError, match=REFUSED):
        read(url)


@pytest.mark.parametrize(
    ("query", "refused"),
    [
        ("sslmode=require", None),
        ("sslmode=verify-ca&sslrootcert={trusted}", None),
        ("sslmode=verify-ca", REFUSED),
        ("sslmode=verify-full&sslrootcert={trusted}", REFUSED),  # it has the name alone
    ],
)
def test_asyncpg_verifies_by_the_parameters_of_libpq(secure_postgres, query, refused) -> None:
    url, trusted = secure_postgres
    near = make_url(f"{url.partition('?')[0]}?{query.format(trusted=trusted)}")

    async def ask() -> bool:
        made = async_engine(near.set(drivername="postgresql+asyncpg", host="127.0.0.1"))
        asked = text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        try:
            async with made.connect() as connection:
                return (await connection.execute(asked)).scalar_one()
        finally:
            await made.dispose()

    if refused is None:
        assert asyncio.run(ask())
        return
    with pytest.raises(ssl.SSLError, match=refused):
        asyncio.run(ask())


def test_an_authority_that_cannot_be_read_is_named() -> None:
    url = make_url("postgresql+asyncpg://db.example/shop?sslrootcert=/no/such/file")
    with pytest.raises(ConfigError, match="sslrootcert=/no/such/file cannot be used"):
        async_engine(url)


def test_without_tls_a_server_on_another_host_is_refused_until_the_url_allows_it(
    database_url,
) -> None:
    schema.init(database_url)
    url = database_url.replace("127.0.0.1", "db.example") + "?hostaddr=127.0.0.1"
    with pytest.raises(ConquietError, match=f"server does not support SSL.*{ADVICE}"):
        read(url)
    assert read(f"{url}&sslmode=disable") == []
    assert read(database_url) == []  # on this host


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        ("postgresql://db.example/shop", "verify-full"),
        ("postgresql://db.example/shop?sslmode=prefer", "prefer"),
        ("postgresql+psycopg2://db.example/shop", "verify-full"),
        ("postgresql+asyncpg://db.example/shop", None),  # which has other parameters
        ("postgresql:///shop?host=db.example:5432&host=127.0.0.1", "verify-full"),
        ("postgresql:///shop?hostaddr=10.0.0.1", "verify-full"),
        ("postgresql://localhost/shop?hostaddr=10.0.0.1", "verify-full"),
        ("postgresql:///shop?service=shop", None),
        ("postgresql://127.0.0.7/shop", None),
        ("postgresql://[::1]/shop", None),
        ("postgresql:///shop?host=/run/postgresql", None),
        ("postgresql:///shop", None),
    ],
)
def test_what_is_set_if_nobody_says_anything(url, mode) -> None:
    query = verify_server(make_url(url)).query
    assert query.get("sslmode") == mode
    assert ("sslrootcert" in query) is (mode == "verify-full")


def test_the_environment_may_lead_elsewhere_too(monkeypatch) -> None:
    monkeypatch.setenv("PGHOST", "db.example")
    assert engine("postgresql:///shop").url.query["sslmode"] == "verify-full"


def test_the_system_s_authorities_are_a_file_that_libpq_finds(monkeypatch, tmp_path) -> None:
    """That of psycopg looks for `system` where no system has it."""
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    for given in ("", "?sslrootcert=system", "?sslmode=verify-full&sslrootcert=system"):
        url = f"postgresql://app:a%2Fb@db.example/shop{given}"
        assert engine(url).url.query["sslrootcert"] == str(bundle)
        text = verify_server_text(url)
        assert make_url(text).query == {"sslmode": "verify-full", "sslrootcert": str(bundle)}
        assert "app:a%2Fb@db.example/shop?" in text
    own = tmp_path / ".postgresql" / "root.crt"
    own.parent.mkdir()
    own.write_text("")
    assert "sslrootcert" not in engine("postgresql://db.example/shop").url.query


@pytest.mark.parametrize(
    ("url", "noticed"),
    [
        ("postgresql://db.example/shop", False),  # it is verified
        ("postgresql://db.example/shop?sslmode=require", True),
        ("postgresql://db.example/shop?sslmode=verify-full", False),
        ("postgresql://127.0.0.1/shop?sslmode=prefer", False),
        ("postgresql:///shop?host=/run/postgresql", False),
        ("sqlite:///shop.sqlite", False),
    ],
)
def test_doctor_notices_a_database_that_is_not_verified(url, noticed) -> None:
    assert bool(list(_check_verification(engine(url).url))) is noticed
