"""`conquiet worker run`: consume messages by a router or a worker of the application."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from conquiet import config
from conquiet.cli.options import add_group, add_settings, flags_of, print_settings, search_here
from conquiet.cli.settings import SETTINGS
from conquiet.cli.terminal import FAILED, OK, has_colour, print_json, red
from conquiet.config import CONFIG_VARIABLE, Loaded, Setting, is_loopback
from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from conquiet.health import Health
    from conquiet.relay.relay import Relay
    from conquiet.router import Router
    from conquiet.worker import Health as WorkerHealth
    from conquiet.worker import Worker

logger = logging.getLogger("conquiet.worker")

_RUN = f"""\
Run a router, or a worker, of your own until its source ends or a signal comes.

TARGET is module:name, looked up from the current directory; the name is that of a Router,
a Worker, or a function that returns one of them.

It runs on an event loop, with async handlers in flight together, if it has an async engine or
client, or if a concurrency is given; else in threads.

A router needs a source of messages and, if its handlers return events and it has no outbox,
a sink. Both are JSON lines of CloudEvents unless you say otherwise:

  -, stdin:, stdout:   the standard streams (default)
  file:PATH            a file; a sink appends to it
  redis://HOST/0?stream=NAME&group=NAME
                       a Redis Stream; a sink needs no group. Also &partitions=N and
                       &dead_letters=NAME. redis:?stream=… is on the server of --broker.
  postgresql://HOST/NAME?topic=NAME&group=NAME, sqlite:///FILE?…
                       an outbox as a log, a source only. Also &partitions=N, &start=now, and
                       &exactly_once=position&producers_repeat=false
  amqp://USER:PASSWORD@HOST/VHOST?queue=NAME
                       a queue of RabbitMQ; a sink needs none. Also &topic=NAME (an exchange to
                       bind it to), &prefetch=N, &dead_letters=NAME
  kafka://HOST:PORT,HOST:PORT?topic=NAME&group=NAME
                       a topic of Kafka; a sink needs no group. Also &start=now,
                       &dead_letters=NAME, and settings of librdkafka
  sqs://REGION/QUEUE   a queue of Amazon SQS, a source only. Also ?lease=SECONDS,
                       &dead_letters=NAME, &endpoint=URL
  kombu+…://…, pubsub://…, http://…, https://…
                       sinks only

A setting is a flag, else a variable of the environment, else a line of the TOML file that
--config or {CONFIG_VARIABLE} names, in its table [worker]; else its default.
"""

_EPILOG = """\
examples:
  conquiet worker run app:router < commands.jsonl > events.jsonl
  conquiet worker run app:router --source file:commands.jsonl --dead-letters failed.jsonl
  conquiet worker run app:make_worker --processes 4 --stuck-after-seconds 60
  conquiet worker run app:router --concurrency 50 --source 'redis:?stream=commands&group=billing'
  conquiet worker run app:router --source 'amqp://app:secret@host/shop?queue=orders'
  conquiet worker run app:router --source 'kafka://host:9092?topic=orders&group=billing'
  conquiet worker run app:make_worker --health 0.0.0.0:8080 --log-format json

A message that keeps failing, and a line that is not a CloudEvent, goes to the dead letters: the
file given, else stderr. So do, at a stop, lines that were read from a pipe or file and not
handled. A Redis Stream or a broker keeps a failed message and delivers it again, up to
--max-attempts times; then it goes to the stream or queue of its dead letters.

The first SIGTERM or Ctrl-C lets messages in flight finish. A second one abandons them.

exit codes:
  0  every line was handled; of other sources, all messages in flight at the stop were finished
  1  a line failed or was not handled, or a message in flight was abandoned
  2  wrong usage or settings
"""


_OF_ROUTERS = {
    "batch_size": "batch_size",
    "batch_wait_seconds": "batch_wait",
    "threads": "threads",
    "ordered": "ordered",
    "concurrency": "concurrency",
}
"""Names of settings, and of what a worker takes."""
_OF_SOURCES = ("broker", "dead_letters", "max_attempts", "max_line_bytes")
_GRACE_SECONDS = 30.0
_BLOCKED_SECONDS = 10.0
"""How long a stuck worker may take to stop; later its event loop is taken for blocked."""


def register(commands: Any, common: ArgumentParser) -> None:
    example = "conquiet worker run app:router < commands.jsonl > events.jsonl"
    verbs = add_group(commands, "worker", "consume messages", example)
    run = verbs.add_parser(
        "run",
        help="run a router or a worker",
        description=_RUN,
        epilog=_EPILOG,
        parents=[common],
    )
    run.set_defaults(run=_run)
    run.add_argument("target", metavar="TARGET", help="module:name, such as app:router")
    add_settings(run, SETTINGS)
    run.add_argument("--json", action="store_true", help="the summary, on stderr, as JSON")


_OF_THE_PROCESS = ("processes", "health", "health_details", "history", "log_format", "log_level")
"""Settings that are not of the worker itself."""


def load_worker_settings(options: Namespace, table: Sequence[Setting]) -> Loaded:
    return config.load(table, flags_of(options, table), file=options.config, section="worker")


def _run(options: Namespace) -> int:
    from conquiet.jsonlines import LinesSource

    found = load_worker_settings(options, SETTINGS)
    if options.print_settings:
        return print_settings(SETTINGS, found.texts, found.origins, options.json)
    # `false` and an empty text are no choice, and a finished worker could not take them.
    chosen = {n: v for n, v in found.given().items() if v and n not in _OF_THE_PROCESS}
    chosen["target"] = options.target
    logs = logs_of(options, found)
    probes = Probes(found)
    search_here()
    if found.values["processes"]:
        return _run_processes(
            found.values["processes"], chosen, logs, probes, keeps_history=found.values["history"]
        )
    with ExitStack() as files:
        worker = _make(chosen, files)
        if "stuck_after_seconds" in chosen and worker.on_stuck is None:
            worker.on_stuck = partial(stop_stuck, worker)
        set_up_logs_of(logs, quiet_nacks=isinstance(worker.source, LinesSource))
        if probes.address is not None:
            from conquiet.health import Check, Health

            count_messages([worker])
            probes.serve(
                Health(
                    {"worker": Check(lambda: worker.health().look(), timeout=1, fresh=0.5)},
                    alive=lambda: worker.health().find_trouble(),
                    metrics=read_metrics,
                    details=probes.details,
                ),
                files,
            )
        if found.values["history"]:
            record_history([worker], files)
        return _run_worker(worker, options.json)


class Probes:
    """Serves `/healthz`, `/readyz` and `/metrics` of a process, if its settings name an address."""

    def __init__(self, found: Loaded) -> None:
        self.address: tuple[str, int] | None = found.values["health"]
        self.details = self.address is not None and (
            found.values["health_details"] or is_loopback(self.address[0])
        )
        given = found.is_given("health")
        self._origin = found.origins["health"] if given else "--health"

    def serve(self, health: Health, open_: ExitStack) -> str:
        """Serve until `open_` is closed; return the URL."""
        assert self.address is not None, "callers look at it"
        from conquiet.health import HealthServer

        server = HealthServer(health, *self.address, self._origin)
        open_.callback(server.close)
        url = f"http://{server.host}:{server.port}"
        logger.info("health is at %s", url)
        return url


def count_messages(workers: Sequence[Worker]) -> None:
    """Add `Metrics` to the routers of workers that have none, if prometheus-client is installed."""
    from conquiet.middleware.metrics import Metrics, instruments_of

    try:
        instruments = instruments_of()
    except ConfigError:
        return
    for worker in workers:
        router = worker.router
        if not any(isinstance(item, Metrics) for item in router.middlewares):
            with suppress(ConfigError):  # it has started: then its messages are not counted
                router.insert(Metrics())
        instruments.watch(worker)


def record_history(
    workers: Sequence[Worker], open_: ExitStack, relay: Relay | None = None, table: str = ""
) -> None:
    """Keep what handlers and relay do for the dashboard, until `open_` is closed."""
    from conquiet.operations.history import record

    recorder = record(workers, relay, table=table)
    if recorder is not None:
        recorder.start()
        open_.callback(recorder.close)


def read_metrics() -> bytes:
    """Return what the process counts for Prometheus."""
    from conquiet.middleware.metrics import exposition

    try:
        return exposition()
    except ImportError:
        return b"# for metrics: pip install 'conquiet[metrics]'\n"


# --- several processes ----------------------------------------------------------------------


def _run_processes(
    count: int, chosen: dict[str, Any], logs: dict[str, str], probes: Probes, *, keeps_history: bool
) -> int:
    from conquiet.processes import Presence, run_processes

    grace = chosen.pop("grace_seconds", _GRACE_SECONDS)
    counts = probes.address is not None
    arguments = {
        "options": chosen,
        "logs": logs,
        "counts": counts,
        "keeps_history": keeps_history,
    }
    set_up_logs_of(logs)
    presence = Presence()
    with ExitStack() as open_:
        if counts:
            from conquiet.health import Check, Health

            shared = _SharedMetrics(open_)
            presence.on_end = shared.forget
            health = Health(
                {"processes": Check(presence.look, timeout=1, fresh=0.5)},
                alive=lambda: None,  # it replaces its processes itself
                metrics=shared.exposition,
                details=probes.details,
                is_stopping=lambda: presence.is_stopping,
            )
            probes.serve(health, open_)
        return run_processes(
            "conquiet.cli.worker:make_in_child",
            count,
            grace,
            arguments=arguments,
            presence=presence,
        )


class _SharedMetrics:
    """Adds up the metrics of several processes, which write them to files of a directory."""

    def __init__(self, open_: ExitStack) -> None:
        import tempfile

        # Read by prometheus-client when a child imports it.
        self._folder = os.environ.get(_FOLDER_VARIABLE) or open_.enter_context(
            tempfile.TemporaryDirectory(prefix="conquiet-metrics-")
        )
        os.environ[_FOLDER_VARIABLE] = self._folder

    def exposition(self) -> bytes:
        try:
            from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        except ImportError:
            return read_metrics()
        registry = CollectorRegistry()
        # This module of prometheus-client has no types.
        multiprocess.MultiProcessCollector(registry, self._folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def forget(self, pid: int) -> None:
        """Remove the gauges of a process that has ended; its counters stay."""
        with suppress(ImportError):
            from prometheus_client import multiprocess

            # As above, without types.
            multiprocess.mark_process_dead(pid, self._folder)  # type: ignore[no-untyped-call]


_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def make_in_child(
    options: dict[str, Any],
    logs: dict[str, str],
    counts: bool = False,
    keeps_history: bool = False,
) -> Worker:
    """Build the worker of one of several processes."""
    set_up_logs_of(logs)
    worker = _make(options, ExitStack(), shared=True)
    if counts:
        count_messages([worker])
        threading.Thread(target=_refresh, name="conquiet-metrics", daemon=True).start()
    if keeps_history:
        open_ = ExitStack()
        record_history([worker], open_)
        atexit.register(open_.close)
    return worker


def _refresh() -> None:
    """Write ages to the files that the supervisor reads, every second."""
    from conquiet.middleware.metrics import instruments_of

    pause = threading.Event()
    with suppress(ConfigError):
        while not pause.wait(1.0):
            instruments_of().refresh()


def stop_stuck(worker: Worker, health: WorkerHealth) -> None:
    """Stop at once; a handler that blocks the event loop would keep the process for ever."""
    worker.stop(grace=0)
    worker.stop(grace=_BLOCKED_SECONDS)
    if worker.health().state != "stopped":
        logger.error(
            "%s blocks the event loop: the process ends. Leave `async` away, and it runs in a"
            " thread",
            health.oldest,
        )
        logging.shutdown()
        os._exit(FAILED)


def _make(options: dict[str, Any], files: ExitStack, shared: bool = False) -> Worker:
    from conquiet.app import App
    from conquiet.processes import resolve
    from conquiet.router import Router
    from conquiet.worker import Worker

    target = options["target"]
    found = resolve(target)
    if isinstance(found, App):
        raise ConfigError(
            f"{target} is an App: run its worker by conquiet run {target} --only worker"
        )
    if not isinstance(found, (Router, Worker)) and callable(found):
        found = _call(target, found)
    if isinstance(found, Router):
        return _make_from_router(found, options, files, shared)
    if not isinstance(found, Worker):
        raise ConfigError(
            f"{target} is {found!r:.80}; it must be a Router, a Worker, or a function that"
            " takes nothing and returns one"
        )
    return _adjust(found, options)


def _call(target: str, factory: Callable[[], Any]) -> Any:
    import inspect

    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ConfigError(
            f"{target} cannot be called without arguments ({error}); give a function that takes"
            " nothing, as functools.partial makes one"
        ) from None
    return factory()


def _make_from_router(
    router: Router, options: dict[str, Any], files: ExitStack, shared: bool
) -> Worker:
    from pathlib import Path

    from conquiet.jsonlines import LinesSink
    from conquiet.registry import (
        SinkOptions,
        SourceOptions,
        connect_sink,
        connect_source,
        is_shareable,
        refuse_one_file_for_both,
    )
    from conquiet.secret import mask
    from conquiet.worker import Worker

    source_url, sink_url = options.get("source", "-"), options.get("sink", "-")
    if shared and not is_shareable(source_url):
        where = "stdin" if source_url == "-" else mask(source_url)
        raise ConfigError(
            f"--processes: {where} is read by one process;"
            " use --threads, or a target that makes a Worker with a source of its own"
        )
    refuse_one_file_for_both(source_url, sink_url)
    if "threads" in options and ("concurrency" in options or router.is_async):
        raise ConfigError(
            "--threads: this worker runs on an event loop; use --concurrency for how many"
            " transactions are in flight at once"
        )
    letters, broker = options.get("dead_letters"), options.get("broker")
    source = connect_source(
        source_url,
        SourceOptions(
            max_attempts=options.get("max_attempts"),
            dead_letters=Path(letters) if letters else None,
            max_line_bytes=options.get("max_line_bytes"),
            broker=broker,
            closing=files,
        ),
    )
    sink_options = SinkOptions(broker=broker, needs_stream=True, origin="--sink", closing=files)
    sink = connect_sink(sink_url, sink_options).sink
    settings = {of: options[name] for name, of in _OF_ROUTERS.items() if name in options}
    worker = Worker(source, router, sink, **settings)
    if isinstance(sink, LinesSink):
        sink.on_closed = worker.stop
    return _adjust_times(worker, options)


def _adjust(worker: Worker, options: dict[str, Any]) -> Worker:
    """Apply the options that a finished worker can still take; refuse the others."""
    for name in ("source", "sink", *_OF_ROUTERS, *_OF_SOURCES):
        if name in options:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for routers; {options['target']} is a worker:"
                " set it where the worker is created"
            )
    return _adjust_times(worker, options)


def _adjust_times(worker: Worker, options: dict[str, Any]) -> Worker:
    worker.grace = options.get("grace_seconds", worker.grace)
    worker.stuck_after = options.get("stuck_after_seconds", worker.stuck_after)
    return worker


# --- one process ----------------------------------------------------------------------------


def _run_worker(worker: Worker, as_json: bool) -> int:
    from conquiet.processes import exclude_loaded_objects

    started = time.monotonic()
    with _WorkerProgress(worker), exclude_loaded_objects():
        finished = _run_on_loop(worker) if worker.is_async else worker.run()
    summary = _summary(worker, finished, time.monotonic() - started)
    if as_json:
        print_json(summary, sys.stderr)
    else:
        print(sentence_of(summary), file=sys.stderr)
    return OK if summary["ok"] else FAILED


def _run_on_loop(worker: Worker) -> bool:
    import asyncio

    runner = asyncio.Runner()
    finished = runner.run(worker.run_async())
    if finished:  # else it would wait for a handler that ignores its cancellation
        runner.close()
    return finished


def _summary(worker: Worker, finished: bool, seconds: float) -> dict[str, Any]:
    from conquiet.jsonlines import LinesSource

    health = worker.health()
    summary: dict[str, Any] = {
        "handled": health.handled - health.failed,
        "failed": health.failed,
        "unhandled": 0,
        "finished": finished,
        "seconds": round(seconds, 3),
    }
    if isinstance(worker.source, LinesSource):  # it counts lines, a worker deliveries
        summary["handled"] = worker.source.acked
        summary["failed"] = worker.source.dead - worker.source.unhandled
        summary["unhandled"] = worker.source.unhandled
        failed = summary["failed"] + summary["unhandled"]
        return {"ok": finished and not failed, **summary}
    return {"ok": finished, **summary}


def sentence_of(summary: dict[str, Any]) -> str:
    """Format a summary in one line."""
    parts = [f"handled {summary['handled']:,}", f"failed {summary['failed']:,}"]
    if summary["unhandled"]:
        parts.append(f"put aside unhandled {summary['unhandled']:,}")
    if not summary["finished"]:
        parts.append("stopped before all messages were finished")
    text = f"{', '.join(parts)}, in {summary['seconds']:.1f} s"
    return text if summary["ok"] else red(text, sys.stderr)


class _WorkerProgress:
    """Shows on the terminal, every half second, how many messages the worker has handled."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="conquiet-progress", daemon=True)
        self._shown = has_colour(sys.stderr) and not sys.stdout.isatty()

    def __enter__(self) -> None:
        if self._shown:
            self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._shown:
            self._thread.join()
            print("\r\x1b[K", end="", file=sys.stderr)

    def _show(self) -> None:
        while not self._ended.wait(0.5):
            health = self._worker.health()
            text = f"handled {health.handled:,}, failed {health.failed:,}"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# --- logs -----------------------------------------------------------------------------------


def logs_of(options: Namespace, found: Loaded) -> dict[str, str]:
    """Return format and level of the logs."""
    level = "debug" if getattr(options, "debug", False) else found.values["log_level"]
    return {"format": found.values["log_format"], "level": level}


def set_up_logs_of(logs: dict[str, str], quiet_nacks: bool = False) -> None:
    """Log to stderr, unless the application has set up its logs itself."""
    from conquiet.cli.logs import set_up_logs

    is_debug = logs["level"] == "debug"
    if not set_up_logs(logs["level"], logs["format"], tracebacks=is_debug):
        return
    if quiet_nacks and not is_debug:
        # Otherwise each attempt of a line would be logged, and in the end its dead letter.
        logging.getLogger("conquiet.router").setLevel(logging.ERROR)
