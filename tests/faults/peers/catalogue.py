"""Which peers are killed, with which settings, and what their documentation promises."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from bench import peers

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PSYCOPG = "psycopg[binary]==3.3.8"
JOBS = "SELECT args::text FROM procrastinate_jobs WHERE queue_name = "
AWA_JOBS = "SELECT args::text FROM awa.jobs WHERE queue"
OUTBOX_ROWS = "SELECT convert_from(payload, 'utf8') FROM outbox WHERE queue"
WORKFLOWS = "SELECT workflow_uuid FROM dbos.workflow_status WHERE name"


class Peer(NamedTuple):
    """A program beside this file, and how it is run."""

    name: str
    program: str
    kind: str = ""
    safe: bool = False
    settings: str = "defaults"
    returns: str = "–"
    """When what a killed process had is given to another."""
    packages: tuple[str, ...] = ()
    """In an environment of their own; none for that of this project."""
    held: str = "SELECT '' WHERE false"
    """Query for what waits in the database; what waits in Redis is found by itself."""
    events: str = "SELECT '' WHERE false"
    quiet: float = 5.0
    """Seconds without a change, after which what is still held counts as held."""

    def python(self) -> Path:
        if not self.packages:
            return Path(sys.executable)
        name = re.sub(r"\[.*\]", "", self.packages[0]).replace("==", "-")
        made = peers.environment(ROOT / f".venv-peer-{name}", [*self.packages, PSYCOPG])
        if made is None:
            raise SystemExit(f"{self.name}: {' '.join(self.packages)} cannot be installed")
        return made

    @property
    def versions(self) -> tuple[str, ...]:
        """The distributions whose versions matter."""
        return {
            "celery_peer.py": ("celery", "kombu", "redis"),
            "faststream_peer.py": ("faststream", "redis"),
            "taskiq_peer.py": ("taskiq-redis", "taskiq", "redis"),
            "procrastinate_peer.py": ("procrastinate",),
            "awa_peer.py": ("awa-pg",),
            "faststream_outbox_peer.py": ("faststream-outbox", "faststream", "asyncpg"),
            "dbos_peer.py": ("dbos", "sqlalchemy"),
            "conquiet_peer.py": ("conquiet", "redis", "sqlalchemy"),
        }[self.program] + ("psycopg",)


CELERY = Peer("Celery, Redis lists", "celery_peer.py", "lists", packages=("celery[redis]==5.7.0",))
OURS = Peer("Celery, conquiet's transport", "celery_peer.py", "streams")
FASTSTREAM = Peer(
    "FastStream, list", "faststream_peer.py", "list", packages=("faststream[redis]==0.7.8",)
)
TASKIQ = Peer(
    "taskiq-redis, ListQueueBroker",
    "taskiq_peer.py",
    "list",
    packages=("taskiq-redis==1.2.4", "taskiq==0.13.0"),
)
PROCRASTINATE = Peer(
    "procrastinate",
    "procrastinate_peer.py",
    packages=("procrastinate==3.10.0",),
    held=f"{JOBS} 'commands' AND status IN ('todo', 'doing')",
    events=f"{JOBS} 'events'",
)
AWA = Peer(
    "awa",
    "awa_peer.py",
    packages=("awa-pg==0.6.9", "sqlalchemy==2.1.8"),
    held=f"{AWA_JOBS} = 'commands' AND state IN ('scheduled', 'available', 'running', 'retryable')",
    events=f"{AWA_JOBS} = 'events'",
)
OUTBOX_BROKER = Peer(
    "faststream-outbox",
    "faststream_outbox_peer.py",
    packages=(
        "faststream-outbox[asyncpg]==0.19.0",
        "faststream==0.7.8",
        "asyncpg==0.32.0",
    ),
    held=f"{OUTBOX_ROWS} = 'commands'",
    events=f"{OUTBOX_ROWS} = 'events'",
)
DBOS = Peer(
    "DBOS",
    "dbos_peer.py",
    packages=("dbos==3.4.0", "sqlalchemy==2.1.8"),
    held=f"{WORKFLOWS} = 'handle' AND status NOT IN ('SUCCESS', 'ERROR', 'CANCELLED')",
    events=f"{WORKFLOWS} = 'event'",
)
CONQUIET = Peer(
    "conquiet, worker and relay",
    "conquiet_peer.py",
    held="SELECT encode(data, 'escape') FROM outbox WHERE published_at IS NULL",
)
LATE = "`task_acks_late`, `task_reject_on_worker_lost`"
SAFE = {"safe": True, "quiet": 20.0, "returns": "5 s"}

PEERS: tuple[Peer, ...] = (
    CELERY._replace(returns="started: never; prefetched: 1 h (`visibility_timeout`)"),
    CELERY._replace(
        settings=f"{LATE}, `visibility_timeout` 5, `unacked_restore_interval` 1,"
        " `unacked_restore_throttle` 1, `unacked_mutex_expire` 5",
        **SAFE,
    ),
    OURS._replace(returns="started: never; prefetched: 60 s (`lease`)"),
    OURS._replace(settings=f"{LATE}, `lease` 5", **SAFE),
    FASTSTREAM._replace(returns="never: a list has no acks"),
    FASTSTREAM._replace(
        name="FastStream, stream with group", kind="stream", returns="never: no consumer claims it"
    ),
    FASTSTREAM._replace(
        name="FastStream, stream with group",
        kind="stream",
        settings="a second subscriber with `min_idle_time` 5000; `max_records` 100,"
        " `AckPolicy.NACK_ON_ERROR`",
        **SAFE,
    ),
    TASKIQ._replace(returns="never: a list has no acks"),
    TASKIQ._replace(
        name="taskiq-redis, RedisStreamBroker",
        kind="stream",
        returns="10 min (`idle_timeout`), when something new is read",
    ),
    TASKIQ._replace(
        name="taskiq-redis, RedisStreamBroker",
        kind="stream",
        settings="`idle_timeout` 5000, `unacknowledged_lock_timeout` 5",
        **SAFE | {"returns": "5 s, when something new is read"},
    ),
    PROCRASTINATE._replace(returns="never by itself"),
    PROCRASTINATE._replace(
        settings="a periodic task that retries stalled jobs (5 s without heartbeat, which beats"
        " every second); the event is deferred in the transaction of the effect",
        **SAFE,
    ),
    AWA._replace(returns="90 to 120 s (`heartbeat_staleness_ms`, `heartbeat_rescue_interval_ms`)"),
    AWA._replace(
        settings="`heartbeat_interval_ms` 1000, `heartbeat_staleness_ms` 4000,"
        " `heartbeat_rescue_interval_ms` 1000, `leader_election_interval_ms` 1000; the event is"
        " inserted in the transaction of the effect",
        **SAFE | {"returns": "5 s, and the backoff of a failed attempt"},
    ),
    OUTBOX_BROKER._replace(returns="60 s (`lease_ttl_seconds`)"),
    OUTBOX_BROKER._replace(
        settings="`lease_ttl_seconds` 5, `max_fetch_interval` 1; the event is published in the"
        " transaction of the effect",
        **SAFE,
    ),
    DBOS._replace(
        settings="the effect is a step", returns="the start of a process with its executor id"
    ),
    DBOS._replace(
        settings="the effect is a transaction of a datasource",
        **SAFE | {"returns": "the start of a process with its executor id"},
    ),
    CONQUIET._replace(returns="60 s (`lease`)"),
    CONQUIET._replace(settings="`lease` 5", **SAFE),
)

SELLERS: tuple[Peer, ...] = (
    CELERY._replace(settings="commit, then `delay`"),
    OURS._replace(settings="commit, then `delay`"),
    FASTSTREAM._replace(settings="commit, then `publish`"),
    TASKIQ._replace(settings="commit, then `kiq`"),
    PROCRASTINATE._replace(settings="commit, then `defer`"),
    PROCRASTINATE._replace(settings="`configure(connection=…).defer` before the commit", safe=True),
    AWA._replace(settings="commit, then `insert`"),
    AWA._replace(settings="`insert_job_sync(connection, …)` before the commit", safe=True),
    OUTBOX_BROKER._replace(settings="commit, then `publish` in a transaction of its own"),
    OUTBOX_BROKER._replace(settings="`publish(session=…)` before the commit", safe=True),
    DBOS._replace(settings="commit, then `enqueue`"),
    DBOS._replace(settings="`enqueue_in_transaction` before the commit", safe=True),
    CONQUIET._replace(settings="`Outbox.add` before the commit, a relay afterwards"),
)
