"""Redis behind TLS, by every door: its certificate is vouched for, and its own, or refused."""

from __future__ import annotations

import contextlib
import ssl

import kombu
import pytest
import redis
from redis.sentinel import MasterNotFoundError
from tests.integration.redis import servers
from tests.security.certificates import certificate

import conquiet.kombu  # noqa: F401 - registers its schemes
from conquiet import Message, cli
from conquiet.errors import ConquietError
from conquiet.redis import StreamSource
from conquiet.registry import SinkOptions, connect_sink, open_sink
from conquiet.spark.log.connection import connect
from conquiet.web.stores import Stores

REFUSED = "CERTIFICATE_VERIFY_FAILED"
OTHERS = "certificate is not valid for"


@pytest.fixture
def secure(redis_server, redis_url, tmp_path, monkeypatch):
    """The port of the Redis behind TLS, and its certificate; of another's name if so asked."""
    with contextlib.ExitStack() as stack:

        def opened(names="IP:127.0.0.1", port=redis_server.port):
            place = tmp_path / f"{names}-{port}".replace(":", "-")
            place.mkdir()
            monkeypatch.setattr(servers, "_certificate", lambda where: certificate(where, names))
            return stack.enter_context(servers.tls_in_front_of(port, place))

        yield opened


def stream(url):
    with redis.Redis.from_url(url) as client:
        StreamSource(client, "orders", "billing").read(1, 0.1)


def sink(url):
    made = open_sink(url, topic="orders")
    try:
        made.publish([Message(b"{}", {"id": "1", "type": "sold", "source": "/shop"})])
    finally:
        made.close()


def worker(url):
    options = SinkOptions(needs_stream=True, check_timeout=5)
    with options.closing:
        connect_sink(f"{url}{'&' if '?' in url else '?'}stream=a", options).check()


def spark(url):
    with connect(url) as client:
        client.ping()


def spark_in_a_cluster(url):
    spark(url.replace("rediss://", "rediss+cluster://").replace("/0", ""))


def dashboard(url):
    stores = Stores(None, url)
    try:
        stores.client.ping()
    finally:
        stores.close()


def celery(url):
    with kombu.Connection(url.replace("rediss://", "rediss-streams://")) as connection:
        connection.connect()


REFUSALS = (ConquietError, redis.RedisError, redis.exceptions.RedisClusterException)
DOORS = (
    stream,
    sink,
    worker,
    spark,
    spark_in_a_cluster,
    dashboard,
    pytest.param(celery, marks=pytest.mark.slow),
)


def whole(error: BaseException | None) -> str:
    return "" if error is None else f"{error} {whole(error.__cause__ or error.__context__)}"


@pytest.mark.parametrize("door", DOORS)
def test_by_no_door_a_certificate_that_is_not_its_own(secure, door) -> None:
    port, _ = secure()
    with pytest.raises(REFUSALS) as raised:
        door(f"rediss://127.0.0.1:{port}/0")
    assert REFUSED in whole(raised.value)
    port, trusted = secure("DNS:elsewhere")
    with pytest.raises(REFUSALS) as raised:
        door(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={trusted}")
    assert OTHERS in whole(raised.value)


def test_the_command_line_says_so_in_one_line(secure, capsys) -> None:
    port, trusted = secure()
    url = f"rediss://127.0.0.1:{port}/0"
    assert cli.main(["streams", "list", "--broker", url]) == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    assert REFUSED in line
    assert cli.main(["doctor", "--broker", url]) == 1
    assert REFUSED in capsys.readouterr().out
    assert cli.main(["streams", "list", "--broker", f"{url}?ssl_ca_certs={trusted}"]) == 0


@pytest.fixture
def sentinels(redis_server, tmp_path, secure):
    """The ports of a sentinel, plain and behind TLS, that names a master behind TLS."""
    master, trusted = secure()
    with servers.sentinel(redis_server._binary, tmp_path, master) as port:

        def patient():
            """It cannot speak TLS itself, and is not to find the master dead."""
            with redis.Redis(port=port) as client:
                setting = ("SENTINEL", "SET", "shop", "down-after-milliseconds", 600_000)
                return client.execute_command(*setting)

        servers.eventually(lambda: _answers(patient), timeout=20)
        behind, _ = secure(port=port)
        yield port, behind, trusted


def _answers(ask):
    with contextlib.suppress(redis.ConnectionError):
        return ask()


def test_a_master_that_a_sentinel_names_is_verified(sentinels, tmp_path) -> None:
    port, behind, trusted = sentinels
    its = tmp_path / f"IP-127.0.0.1-{port}" / "certificate.pem"
    url = f"rediss+sentinel://127.0.0.1:{behind}/shop/0"
    with connect(url) as client, pytest.raises(MasterNotFoundError, match="No master found"):
        client.ping()  # of a sentinel that it cannot verify, redis-py says no more
    with connect(f"{url}?sentinel_ssl_ca_certs={its}") as client:
        with pytest.raises(redis.RedisError) as raised:
            client.ping()
        assert REFUSED in whole(raised.value)
    with connect(f"{url}?sentinel_ssl_ca_certs={its}&ssl_ca_certs={trusted}") as client:
        assert client.ping()


@pytest.mark.slow  # as is the transport in saying that it gives up
def test_kombu_verifies_a_master_that_a_sentinel_names(sentinels) -> None:
    port, _, trusted = sentinels
    url, options = f"sentinel-streams://127.0.0.1:{port}/0", {"master_name": "shop"}
    for asked in (True, {"ssl_cert_reqs": ssl.CERT_REQUIRED}):
        with (
            kombu.Connection(url, ssl=asked, transport_options=options) as connection,
            pytest.raises(redis.RedisError) as raised,
        ):
            connection.connect()
        assert REFUSED in whole(raised.value)
    settings = {"ssl_ca_certs": str(trusted)}
    with kombu.Connection(url, ssl=settings, transport_options=options) as connection:
        assert connection.default_channel.client.ping()
