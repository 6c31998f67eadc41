"""What the tests of several rooms ask of the worker's Redis behind its back."""

from __future__ import annotations

import threading

import pytest
import redis


@pytest.fixture
def recorded(redis_url):
    """Run a function, and return every command that the server got meanwhile, by MONITOR."""

    def record(run):
        commands: list[str] = []
        with redis.Redis.from_url(redis_url) as client, client.monitor() as monitor:

            def listen():
                for seen in monitor.listen():
                    if seen["command"] == "ECHO recorded":
                        return
                    commands.append(seen["command"])

            listener = threading.Thread(target=listen)
            listener.start()
            try:
                run()
            finally:
                client.echo("recorded")
                listener.join()
        return commands

    return record
