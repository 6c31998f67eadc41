"""The seam misses nothing, kills where it is told to, and notices what passes beside it.

Each test runs a few lines in a process of its own: a seam is never taken off again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests import zygote

ROOT = Path(__file__).resolve().parents[2]

REDIS = """
import os, redis, sys
from tests.faults.seam import Fate, Seam
seam = Seam({fate})
seam.install()
client = redis.Redis.from_url(sys.argv[1])
client.set("a", 1)
client.set("b", 2)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return zygote.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def numbers(url: str) -> list[int]:
    """The numbers of the two SETs among the calls."""
    tell = "print(*[p.number for p in seam.points if p.label == 'sendall SET'])"
    return [int(number) for number in run(REDIS.format(fate="None") + tell, url).stdout.split()]


def test_it_kills_before_amid_and_after_a_call(redis_url, redis_client):
    _, second = numbers(redis_url)
    for side, stored in (("before", None), ("half", None), ("after", b"2")):
        redis_client.flushdb()
        fate = f"Fate('MainThread', {second}, {side!r})"
        assert run(REDIS.format(fate=fate), redis_url).returncode == -signal.SIGKILL
        assert redis_client.get("a") == b"1"
        redis_client.ping()  # by now the server has read what the dead process had sent
        assert redis_client.get("b") == stored


def test_nothing_of_redis_py_passes_beside_it(redis_url):
    done = run(REDIS.format(fate="None") + "print(seam.audit())", redis_url)
    assert done.stdout == "[]\n", done.stderr


def test_bytes_that_pass_beside_it_are_noticed(redis_url):
    beside = """
file = client.connection_pool._available_connections[0]._sock.fileno()
os.write(file, b"*1\\r\\n$4\\r\\nPING\\r\\n")
print(seam.audit())
"""
    told = run(REDIS.format(fate="None") + beside, redis_url).stdout
    assert "bytes were sent on a socket before 'the end'" in told


def test_nothing_of_psycopg_passes_beside_it(database_url):
    code = """
import psycopg, sys
from tests.faults.seam import Seam
seam = Seam()
seam.install()
connection = psycopg.connect(sys.argv[1])
connection.execute("CREATE TABLE t (n int)")
with connection.pipeline():
    for number in range(3):
        connection.execute("INSERT INTO t VALUES (%s)", (number,))
with connection.cursor().copy("COPY t FROM STDIN") as copy:
    copy.write_row((7,))
connection.commit()
print(seam.audit(), len(seam.points) > 12)
"""
    done = run(code, database_url)
    assert done.stdout == "[] True\n", done.stderr


def test_nothing_of_sqlite_passes_beside_it(tmp_path):
    code = """
import sqlite3, sys
from tests.faults.seam import Seam
seam = Seam()
seam.install()
connection = sqlite3.connect(sys.argv[1])
connection.execute("CREATE TABLE t (n)")
connection.execute("INSERT INTO t VALUES (1)")
connection.commit()
print(seam.audit(), [point.label for point in seam.points])
sqlite3.Connection.execute(connection, "SELECT 1")
sqlite3.Cursor.execute(sqlite3.Connection.cursor(connection, sqlite3.Cursor), "SELECT 2")
print(seam.audit())
"""
    first, second = run(code, str(tmp_path / "a.sqlite")).stdout.splitlines()
    assert first == (
        "[] ['sqlite connect', 'sqlite execute CREATE TABLE t', 'sqlite execute INSERT INTO t',"
        " 'sqlite commit']"
    )
    assert "SELECT 2" in second
