"""The kill script of the peers: its reader sees what is there, and its counts add up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from tests import needs
from tests.faults.peers import reader, trial

ROOT = Path(__file__).resolve().parents[3]


def test_the_reader_finds_what_waits_and_what_was_emitted(redis_client, redis_url, database_url):
    redis_client.rpush("queue", b'{"args": ["cmd-00001"]}', b"tick-1")
    redis_client.hset("unacked", "tag", b"cmd-00002")
    acked, *_ = [redis_client.xadd("stream", {"data": f"cmd-{n:05}"}) for n in (3, 4, 5)]
    redis_client.xgroup_create("stream", "group", id="0")
    redis_client.xreadgroup("group", "me", {"stream": ">"}, count=2)
    redis_client.xack("stream", "group", acked)
    redis_client.lpush("events", b"cmd-00006", b"cmd-00006")
    with psycopg.connect(database_url) as connection:
        connection.execute(trial.TABLES)
        connection.execute("INSERT INTO effects VALUES ('cmd-00007'), ('tick-1')")
    found = reader.read(database_url, redis_url, "SELECT 'cmd-00008'", "SELECT 'cmd-00009'")
    assert found.held == {f"cmd-{number:05}" for number in (1, 2, 4, 5, 8)}
    assert found.events == {"cmd-00006": 2, "cmd-00009": 1}
    assert found.effects == {"cmd-00007": 1}


def test_each_command_is_counted_as_once_repeated_held_or_lost():
    stores = reader.Stores(
        sold=frozenset(),
        effects=Counter({"a": 1, "b": 2, "e": 1}),
        events=Counter({"a": 2, "b": 1, "c": 1}),
        held=frozenset({"b", "c"}),
    )
    found = trial.judge(stores, {"a", "b", "c", "d", "e"}, seconds=1.26)
    assert found == trial.Outcome(
        sent=5,
        once=2,
        repeated=1,
        held=1,
        lost=1,
        silent=1,
        unfounded=1,
        events_repeated=1,
        drain_seconds=1.3,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_peer_and_conquiet_are_killed_and_the_counts_add_up(tmp_path, redis_server):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "scripts" / "peers.py"), "--json", str(figures)]
    command += ["--only", "FastStream", "--only", "conquiet, worker"]
    command += ["--commands", "400", "--kills", "2", "--sale-kills", "3"]
    page = (ROOT / "docs" / "reliability.md").read_bytes()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "cannot be installed" in done.stderr:
        needs.missing("FastStream", "it cannot be installed")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (ROOT / "docs" / "reliability.md").read_bytes() == page
    found = json.loads(figures.read_text())
    outcomes = [(peer, what) for peer, what in found if "sent" in what]
    assert len(outcomes) == 5
    for peer, what in outcomes:
        assert what["sent"] == 400
        assert what["once"] + what["repeated"] + what["held"] + what["lost"] == 400, peer
        assert what["once"] > 0, peer
        if peer["program"] == "conquiet_peer.py":
            assert what["lost"] == what["repeated"] == what["unfounded"] == 0
    [[_, safe]] = [pair for pair in outcomes if pair[0]["settings"] == "`lease` 5"]
    assert safe["once"] == 400
    assert safe["silent"] == 0
    sales = [(peer, what) for peer, what in found if "rows" in what]
    [ours] = [what for peer, what in sales if peer["program"] == "conquiet_peer.py"]
    assert ours["rows"] > 0
    assert ours["rows_alone"] == ours["commands_alone"] == 0
