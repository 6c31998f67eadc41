"""Tasks: functions over the parts of a batch, run in this process or by Spark's executors.

Definitions travel as bytes. Structs of modules that an executor cannot import (`__main__`, a
notebook) travel by value.
"""

from __future__ import annotations

import gc
import io
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
import pyarrow as pa

from conquiet.lake.definition import Definition
from conquiet.lake.judge import Judge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("conquiet.lake")

Item = TypeVar("Item")
Result = TypeVar("Result")
Take = Callable[[Iterable[pa.RecordBatch]], Iterator[Any]]


class Tasks(Protocol):
    """Runs the parts of a batch."""

    @property
    def cores(self) -> int: ...

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]: ...


class Here:
    """Runs tasks in this process, one after the other."""

    cores = 1

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        return [function(one) for one in items]


class Executors:
    """Runs tasks on Spark's executors, one task per item."""

    def __init__(self, spark: SparkSession) -> None:
        from pyspark.sql import SparkSession as ClassicSession

        self._spark = spark
        self._is_remote = not isinstance(spark, ClassicSession)

    @property
    def cores(self) -> int:
        """The cores of the executors that there are now: those of a cluster come and go."""
        if self._is_remote:
            return 8  # a server says nothing of its executors
        return max(1, int(self._spark.sparkContext.defaultParallelism))

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        if not items:
            return []
        paths = list(sys.path)

        def run(item: bytes) -> bytes:
            _see(paths)
            return pickle.dumps(function(pickle.loads(item)))

        given = [pickle.dumps(one) for one in items]
        done = self._map_rows(run, given) if self._is_remote else self._map_items(run, given)
        return [pickle.loads(one) for one in done]

    def warm_up(self, definition: bytes) -> None:
        """Let the Python processes of executors import what tasks need, while Spark plans."""
        if self._is_remote:
            return
        items = [definition] * self.cores

        def run() -> None:
            try:
                self.map(_prepare, items)
            except Exception as error:  # noqa: BLE001 - the first task will say so
                logger.info("could not warm executors up: %s", error)

        threading.Thread(target=run, name="conquiet-warm-up", daemon=True).start()

    def _map_items(self, run: Callable[[bytes], bytes], given: list[bytes]) -> list[bytes]:
        """Run a job without SQL: nothing is planned, and no code is generated for it."""
        return self._spark.sparkContext.parallelize(given, len(given)).map(run).collect()

    def _map_rows(self, run: Callable[[bytes], bytes], given: list[bytes]) -> list[bytes]:
        """Run a job through Spark Connect, which knows frames alone."""

        def run_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                places = batch.column(0)
                done = pa.array([run(given[place]) for place in places.to_pylist()], pa.binary())
                yield pa.RecordBatch.from_arrays([places, done], ["place", "result"])

        numbers = self._spark.range(0, len(given), 1, len(given))
        rows = numbers.mapInArrow(run_batches, "place BIGINT, result BINARY").collect()
        return [bytes(row[1]) for row in sorted(rows)]

    def take(self, frame: DataFrame, take: Take) -> list[Any]:
        """Run a function over the rows of a frame, partition by partition."""
        paths = list(sys.path)

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            _see(paths)
            for one in take(batches):
                yield pa.RecordBatch.from_arrays(
                    [pa.array([pickle.dumps(one)], pa.binary())], ["result"]
                )

        return [
            pickle.loads(bytes(row[0])) for row in frame.mapInArrow(run, "result BINARY").collect()
        ]


def balance(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide things that have a size into groups of about the same size, the largest first;
    return their places.

    >>> balance([3, 0, 5, 2, 1], 2)
    [[2, 4], [0, 3]]
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for place in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        if sizes[place]:
            lightest = loads.index(min(loads))
            groups[lightest].append(place)
            loads[lightest] += sizes[place]
    order = sorted(range(parts), key=lambda one: -loads[one])
    return [sorted(groups[one]) for one in order if groups[one]]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of cycles, which would walk through all events of a task again and
    again: a third of the time of a task."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _see(paths: list[str]) -> None:
    """Let a worker on the driver's machine import what the driver imports."""
    known = set(sys.path)
    sys.path.extend(path for path in paths if path not in known)


# --- definitions --------------------------------------------------------------------------------


def dump_definition(definition: Definition) -> bytes:
    """Pickle a definition for executors."""
    from pyspark import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type) and issubclass(obj, msgspec.Struct) and _is_local(obj):
                return _reduce_struct(obj)
            return super().reducer_override(obj)  # type: ignore[no-untyped-call]

    out = io.BytesIO()
    Pickler(out).dump(definition)  # type: ignore[no-untyped-call]
    return out.getvalue()


_judges: dict[bytes, Judge] = {}


def _prepare(definition: bytes) -> None:
    from conquiet.lake import facts, silver  # noqa: F401 - imported for the tasks to come

    pa.table({"imports": pa.array([], pa.int64())})  # pandas, at the first table of a process
    judge_of(definition)


def judge_of(definition: bytes) -> Judge:
    """Unpickle a definition, once per process, and build its judge."""
    found = _judges.get(definition)
    if found is None:
        found = _judges[definition] = Judge(pickle.loads(definition))
    return found


def share_definition(definition: Definition, tasks: Tasks) -> bytes:
    """Return what tasks find the definition by: a pickle for executors. This process keeps the
    definition itself, with the user's own classes."""
    shared = dump_definition(definition) if isinstance(tasks, Executors) else uuid4().bytes
    _judges.clear()
    _judges[shared] = Judge(definition)
    return shared


def _is_local(struct: type) -> bool:
    """Return whether other processes cannot import a struct."""
    name = struct.__module__
    if name == "__main__" or "<locals>" in struct.__qualname__:
        return True
    try:
        return find_spec(name) is None
    except (ImportError, ValueError, AttributeError):
        return True


_CONFIG = (
    "frozen",
    "eq",
    "order",
    "array_like",
    "gc",
    "repr_omit_defaults",
    "omit_defaults",
    "forbid_unknown_fields",
    "weakref",
    "dict",
    "cache_hash",
    "tag",
    "tag_field",
)


def _reduce_struct(struct: type[msgspec.Struct]) -> Any:
    fields = [
        (one.name, one.type, one.encode_name, one.default, one.default_factory)
        for one in msgspec.structs.fields(struct)
    ]
    config = {name: getattr(struct.__struct_config__, name) for name in _CONFIG}
    given = {
        name: value
        for name, value in vars(struct).items()
        if name not in struct.__struct_fields__ and not name.startswith("__")
    }
    names = (struct.__name__, struct.__qualname__, struct.__module__)
    kw_only = len(struct.__match_args__) < len(fields)
    bases = tuple(one for one in struct.__bases__ if one is not msgspec.Struct)
    return _make_struct, (names, bases, fields, config, kw_only), given, None, None, _set_members


def _make_struct(
    names: tuple[str, str, str],
    bases: tuple[type[msgspec.Struct], ...],
    fields: list[Any],
    config: dict[str, Any],
    kw_only: bool,
) -> Any:
    made: list[Any] = []
    for name, kind, _, default, factory in fields:
        if factory is not msgspec.NODEFAULT:
            made.append((name, kind, msgspec.field(default_factory=factory)))
        elif default is not msgspec.NODEFAULT:
            made.append((name, kind, default))
        else:
            made.append((name, kind))
    name, qualified, module = names
    rename = {one[0]: one[2] for one in fields if one[0] != one[2]} or None
    struct = msgspec.defstruct(
        name, made, module=module, rename=rename, kw_only=kw_only, bases=bases or None, **config
    )
    struct.__qualname__ = qualified
    return struct


def _set_members(struct: type, members: dict[str, Any]) -> None:
    for name, value in members.items():
        if not name.startswith("_abc_"):
            setattr(struct, name, value)
