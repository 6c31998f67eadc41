"""Measure the house: files, lines, modules with one importer, names, and the walk of one message.

    .venv/bin/python scripts/house.py                 the tree that this script is in
    .venv/bin/python scripts/house.py --counts        without the walks, which start servers
    PYTHONPATH=OTHER/src .venv/bin/python scripts/house.py --source OTHER/src

A walk counts the files of conquiet that one message passes, and how often the call stack moves
from one file to another, on a path that is already warm: of a worker, from the handler of one
message to that of the next. Servers are private.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

_HERE = Path(__file__).resolve().parent.parent
_GERUND = re.compile(r"(^|_)[a-z]{3,}ing$")
_PARTICIPLE = re.compile(
    r"(?!feed|need|seed|speed|embed|exceed|proceed|succeed|breed|bleed)[a-z]{2,}ed|bound|broken|"
    r"brought|built|chosen|done|drawn|found|frozen|given|gone|grown|held|hidden|kept|known|lost|"
    r"made|meant|met|paid|seen|sent|shown|sold|spent|stuck|taken|thrown|told|written"
)
_TIMEOUT_SECONDS = 20.0


# --- counts -------------------------------------------------------------------------------------


def count(source: Path) -> dict[str, str]:
    """Count files, lines, modules with one importer, and names that are no nouns or verbs."""
    files = sorted(source.rglob("*.py"))
    modules = {_module(source, file): file for file in files}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for target in _imports(ast.parse(file.read_text()), set(modules)):
            if target != name and file.name != "__init__.py":
                importers[target].add(name)
    plain = [name for name, file in modules.items() if file.name not in _NO_CONCEPT]
    lonely = [name for name in plain if len(importers[name]) == 1]
    gerunds = [name for name in plain if _GERUND.search(name.rpartition(".")[2])]
    return {
        "files": str(len(files)),
        "lines": f"{sum(len(file.read_text().splitlines()) for file in files):,}",
        "modules with one importer": f"{len(lonely)} ({len(lonely) / len(plain):.0%})",
        "modules named by a gerund": str(len(gerunds)),
        "functions named by a participle": _count_participles(files),
        "class names twice in a room": str(_count_twins(source, files)),
    }


_NO_CONCEPT = ("__init__.py", "__main__.py")


def _count_participles(files: list[Path]) -> str:
    """Count functions whose whole name is a participle; properties are adjectives."""
    names = [
        node.name.strip("_")
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("__")
        and not any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    ]
    found = [name for name in names if _PARTICIPLE.fullmatch(name)]
    return f"{len(found)} ({len(found) / max(1, len(names)):.1%})"


def _count_twins(source: Path, files: list[Path]) -> int:
    """Count class names that two modules of one room define."""
    homes: dict[tuple[str, ...], set[Path]] = {}
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                room = file.relative_to(source).parts[1:-1][:1]
                homes.setdefault((*room, node.name), set()).add(file)
    return sum(len(found) > 1 for found in homes.values())


def _module(source: Path, file: Path) -> str:
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


# --- walks --------------------------------------------------------------------------------------


class Walk:
    """Records which files of the package are entered, in which order."""

    def __init__(self, package: Path) -> None:
        self._package = str(package)
        self._lock = threading.Lock()
        self._last: dict[int, str] = {}
        self.files: dict[str, int] = {}
        self.changes = 0

    @contextmanager
    def record(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Record the calls of this thread, and of threads that are started from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # accepted, and not in the stubs

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        if not name.startswith(self._package) or name.endswith("__init__.py"):
            return
        thread = threading.get_ident()
        with self._lock:
            self.files[name] = self.files.get(name, 0) + 1
            if self._last.get(thread) != name:
                self._last[thread] = name
                self.changes += 1


def walks(package: Path, verbose: bool) -> dict[str, str]:
    """Send one message along each path and describe its walk."""
    found = {}
    for name, path in _PATHS.items():
        walk = Walk(package)
        path(walk)
        found[f"walk: {name}"] = f"{len(walk.files)} files, {walk.changes} changes"
        if verbose:
            for file in walk.files:
                print(f"    {name}: {Path(file).relative_to(package)}")
    return found


def _wait(until: Callable[[], object], what: str) -> None:
    end = time.monotonic() + _TIMEOUT_SECONDS
    while not until():
        if time.monotonic() > end:
            raise SystemExit(f"house: {what} did not happen within {_TIMEOUT_SECONDS:g} s")
        time.sleep(0.002)


def _message() -> Any:
    import msgspec

    from conquiet import Message

    attributes = {"id": uuid.uuid4().hex, "type": "place.order", "source": "/house"}
    return Message(msgspec.json.encode({"id": "o-1"}), attributes)


_WARM = 3
"""Messages that a worker handles before the one that is walked."""


def _router(walk: Walk, *middlewares: Any) -> tuple[Any, list[str]]:
    import msgspec

    from conquiet import Router

    handled: list[str] = []

    class PlaceOrder(msgspec.Struct):
        id: str

    class OrderPlaced(msgspec.Struct):
        id: str

    router = Router()
    router.use(*middlewares)

    @router.command(source="/orders")
    def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        handled.append(order.id)
        if len(handled) == _WARM:
            walk.begin()
        elif len(handled) > _WARM:
            walk.end()
        return [OrderPlaced(order.id)]

    return router, handled


def _walk_redis(walk: Walk) -> None:
    import redis as redis_client

    from conquiet import Worker, embedded
    from conquiet import redis as room

    with embedded.redis() as server, redis_client.Redis.from_url(server.url) as client:
        sink = room.StreamSink(client, "commands")
        source = room.StreamSource(client, "commands", group="house")
        router, handled = _router(
            walk, room.Transaction(client), room.Inbox("house"), room.Outbox("events")
        )
        sink.publish([_message() for _ in range(_WARM + 1)])
        _run(Worker(source, router, batch_size=1), handled)


def _run(worker: Any, handled: list[str]) -> None:
    worker.start()
    _wait(lambda: len(handled) > _WARM, "a handled message")
    worker.stop()


def _walk_sql(walk: Walk) -> None:
    from conquiet import Worker, sql
    from conquiet.memory import Log

    with tempfile.TemporaryDirectory() as folder:
        engine = _outbox_engine(f"sqlite:///{folder}/house.sqlite")
        chain = (sql.Transaction(engine), sql.Inbox("house"), sql.Outbox("events"))
        router, handled = _router(walk, *chain)
        log = Log()
        log.sink("commands").publish([_message() for _ in range(_WARM + 1)])
        _run(Worker(log.source(group="house"), router, batch_size=1), handled)
        engine.dispose()


def _outbox_engine(url: str) -> Any:
    from conquiet import sql

    engine = sql.engine(url)
    if hasattr(sql, "init"):
        sql.init(engine)
    else:
        from importlib import import_module

        import_module("conquiet.sql.schema").init(engine)
    return engine


def _walk_relay(walk: Walk) -> None:
    import redis as redis_client

    from conquiet import embedded, sql
    from conquiet import redis as room
    from conquiet.relay import Relay

    with (
        tempfile.TemporaryDirectory() as folder,
        embedded.redis() as server,
        redis_client.Redis.from_url(server.url) as client,
    ):
        engine = _outbox_engine(f"sqlite:///{folder}/house.sqlite")
        outbox = sql.Outbox("events")
        relay = Relay(sql.OutboxSource(engine), room.StreamSink(client, "events"))
        for number in (1, 2):
            with engine.begin() as connection:
                outbox.add(connection, [_message()])
            if number == 1:
                _publish_once(relay)
            else:
                with walk.record():
                    _publish_once(relay)
        assert client.xlen("events") == 2
        engine.dispose()


def _publish_once(relay: Any) -> None:
    with suppress(StopIteration):
        relay.run_once()


def _walk_kombu(walk: Walk) -> None:
    import kombu

    import conquiet.kombu  # noqa: F401 - registers the transport
    from conquiet import embedded

    with embedded.redis() as server:
        url = server.url.replace("redis://", "redis-streams://")
        with kombu.Connection(url) as connection:
            queue = connection.SimpleQueue("house")
            queue.put({"id": 1})
            queue.get(timeout=_TIMEOUT_SECONDS).ack()
            with walk.record():
                queue.put({"id": 2})
                queue.get(timeout=_TIMEOUT_SECONDS).ack()
            queue.close()


def _walk_spark(walk: Walk) -> None:
    import redis as redis_client
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from conquiet import embedded
    from conquiet import redis as room
    from conquiet.spark import register

    class Formats:
        known: dict[str, Any] = {}  # noqa: RUF012 - one of a kind

        def register(self, kind: Any) -> None:
            self.known[kind.name()] = kind

    class Session:
        dataSource = Formats()  # noqa: N815 - Spark's name

    register(Session())  # type: ignore[arg-type]
    with embedded.redis() as server, redis_client.Redis.from_url(server.url) as client:
        room.StreamSink(client, "events").publish([_message()])
        source = Formats.known["conquiet"]({"url": server.url, "streams": "events"})
        reader = source.streamReader(_schema(source.schema()))
        start = reader.initialOffset()
        with walk.record():
            end = reader.latestOffset(start, ReadAllAvailable())
            for partition in reader.partitions(start, end):
                list(reader.read(partition))
            reader.commit(end)


def _schema(ddl: str) -> Any:
    """Parse the columns of the log without a JVM."""
    from pyspark.sql import types

    kinds = {"TIMESTAMP": types.TimestampType(), "BINARY": types.BinaryType()}
    texts = types.MapType(types.StringType(), types.StringType())
    schema = types.StructType()
    for column in re.sub(r"MAP<[^>]*>", "MAP", ddl, flags=re.IGNORECASE).split(","):
        name, kind = column.split()[:2]
        found = texts if kind.upper() == "MAP" else kinds.get(kind.upper(), types.StringType())
        schema.add(name.strip("`"), found)
    return schema


_PATHS: dict[str, Callable[[Walk], None]] = {
    "a command through Redis": _walk_redis,
    "a command through SQL": _walk_sql,
    "a row through the relay": _walk_relay,
    "a message through Kombu": _walk_kombu,
    "a Spark micro-batch": _walk_spark,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--source", type=Path, default=_HERE / "src", metavar="DIR")
    parser.add_argument("--verbose", action="store_true", help="list the files of each walk")
    parser.add_argument("--counts", action="store_true", help="no walks, and so no servers")
    chosen = parser.parse_args()
    source = chosen.source.resolve()
    rows = count(source)
    if not chosen.counts:
        rows |= walks(source / "conquiet", chosen.verbose)
    for name, value in rows.items():
        print(f"{name:<32} {value:>24}")


if __name__ == "__main__":
    main()
