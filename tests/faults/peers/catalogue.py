"""Which peers are killed, with which settings, and what their documentation promises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from bench import peers

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PSYCOPG = "psycopg[binary]==3.3.8"
JOBS = "SELECT args::text FROM procrastinate_jobs WHERE queue_name = "


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
        name = self.packages[0].replace("==", "-").replace("[redis]", "")
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
        name="FastStream, stream with group", kind="stream", returns="never: nobody claims it"
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
    CONQUIET._replace(settings="`Outbox.add` before the commit, a relay afterwards"),
)
