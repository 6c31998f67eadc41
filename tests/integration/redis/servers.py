"""Clusters, sentinels and TLS for tests, made of private servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import threading

import redis
from tests import needs
from tests.waiting import eventually

from conquiet import embedded
from conquiet.embedded.server import free_port

_SLOTS = 16_384


@contextlib.contextmanager
def cluster(nodes=3):
    """The ports of the nodes of a cluster that covers all slots."""
    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        servers = [
            stack.enter_context(
                needs.found("Redis", lambda: embedded.redis(options=options, private=True))
            )
            for _ in range(nodes)
        ]
        clients = [stack.enter_context(redis.Redis.from_url(item.url)) for item in servers]
        for number, client in enumerate(clients):
            share = range(_SLOTS * number // nodes, _SLOTS * (number + 1) // nodes)
            client.execute_command("CLUSTER", "ADDSLOTS", *share)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)

        def is_whole():
            states = [client.execute_command("CLUSTER INFO") for client in clients]
            return all(
                state["cluster_state"] == "ok" and state["cluster_known_nodes"] == str(nodes)
                for state in states
            )

        eventually(is_whole, timeout=60, interval=0.1)
        yield [server.port for server in servers]


@contextlib.contextmanager
def sentinel(binary, directory, master_port, name="shop"):
    """The port of a sentinel that watches one master."""
    port = free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"bind 127.0.0.1\nport {port}\nsentinel monitor {name} 127.0.0.1 {master_port} 1\n"
        f"sentinel down-after-milliseconds {name} 1000\nsentinel failover-timeout {name} 5000\n"
    )
    process = subprocess.Popen(
        [binary, config, "--sentinel"], stdout=subprocess.DEVNULL, cwd=directory
    )
    try:
        yield port
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)


def _certificate(directory):
    """A self-signed one for this host, and its key."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@contextlib.contextmanager
def tls_in_front_of(port, directory):
    """The port of a TLS terminator before a plain server, and its certificate's path.

    The servers that pip installs are built without TLS; a client cannot tell the difference.
    """
    certificate, key = _certificate(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()

    async def pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()

    async def serve(reader, writer):
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        finally:
            for one in (writer, inner_writer):
                one.transport.abort()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def close():
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # what was aborted is closed in the next turns of the loop
            await asyncio.sleep(0)

    try:
        yield server.sockets[0].getsockname()[1], certificate
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
