"""`conquiet worker run`: consume messages by a router or a worker of the application."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from conquiet.cli.options import (
    add_broker,
    add_group,
    add_setting,
    count,
    positive_seconds,
    search_here,
    seconds,
)
from conquiet.cli.terminal import FAILED, OK, has_colour, print_json, red
from conquiet.config import LOG_FORMAT, LOG_LEVEL
from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from conquiet.router import Router
    from conquiet.worker import Health, Worker

_RUN = """\
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
"""

_EPILOG = """\
examples:
  conquiet worker run app:router < commands.jsonl > events.jsonl
  conquiet worker run app:router --source file:commands.jsonl --dead-letters failed.jsonl
  conquiet worker run app:make_worker --processes 4 --stuck-after-seconds 60
  conquiet worker run app:router --concurrency 50 --source 'redis:?stream=commands&group=billing'
  conquiet worker run app:router --source 'amqp://app:secret@host/shop?queue=orders'
  conquiet worker run app:router --source 'kafka://host:9092?topic=orders&group=billing'

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


_OF_ROUTERS = ("batch_size", "batch_wait", "threads", "ordered", "concurrency")
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
    run.add_argument("--source", metavar="URL", help="where a router's messages come from")
    run.add_argument("--sink", metavar="URL", help="where a router's events go to")
    add_broker(run)
    add_worker_options(run)
    run.add_argument(
        "--batch-wait-seconds",
        dest="batch_wait",
        type=seconds,
        metavar="S",
        help="how long to wait for a full batch (0)",
    )
    run.add_argument(
        "--processes",
        type=count,
        metavar="N",
        help="workers, each in a process; one that ends is replaced",
    )
    run.add_argument(
        "--max-attempts",
        type=count,
        metavar="N",
        help="deliveries before a dead letter (3; 10 in a database, 25 on Redis and brokers)",
    )
    run.add_argument("--dead-letters", metavar="PATH", help="file to append failed messages to")
    run.add_argument(
        "--max-line-bytes", type=count, metavar="N", help="longest line accepted (32 MiB)"
    )
    add_setting(run, LOG_FORMAT)
    add_log_level(run)
    run.add_argument("--json", action="store_true", help="the summary, on stderr, as JSON")


def add_worker_options(parser: ArgumentParser) -> None:
    """Add what a worker takes, of a router or of an app."""
    parser.add_argument("--batch-size", type=count, metavar="N", help="messages per batch (100)")
    parser.add_argument("--threads", type=count, metavar="N", help="threads of a worker (1)")
    parser.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help="on an event loop, transactions in flight at once (100)",
    )
    parser.add_argument(
        "--ordered", action="store_true", default=None, help="keep the order of each key"
    )
    parser.add_argument(
        "--grace-seconds",
        dest="grace",
        type=seconds,
        metavar="S",
        help="time to finish messages in flight at a stop (30)",
    )
    parser.add_argument(
        "--stuck-after-seconds",
        dest="stuck_after",
        type=positive_seconds,
        metavar="S",
        help="end a process whose handler takes longer",
    )


def add_log_level(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--log-level", metavar="VALUE", help=f"{LOG_LEVEL.meaning} (warning); {LOG_LEVEL.variable}"
    )


def _run(options: Namespace) -> int:
    from conquiet.jsonlines import LinesSource

    left_out = ("run", "json", "debug", "processes", "log_format", "log_level")
    chosen = {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in left_out
    }
    logs = logs_of(options)
    search_here()
    if options.processes:
        from conquiet.processes import run_processes

        grace = chosen.pop("grace", _GRACE_SECONDS)
        arguments = {"options": chosen, "logs": logs}
        set_up_logs_of(logs)
        return run_processes(
            "conquiet.cli.worker:make_in_child", options.processes, grace, arguments=arguments
        )
    with ExitStack() as files:
        worker = _make(chosen, files)
        if "stuck_after" in chosen and worker.on_stuck is None:
            worker.on_stuck = partial(stop_stuck, worker)
        set_up_logs_of(logs, quiet_nacks=isinstance(worker.source, LinesSource))
        return _run_worker(worker, options.json)


def stop_stuck(worker: Worker, health: Health) -> None:
    """Stop at once; a handler that blocks the event loop would keep the process for ever."""
    worker.stop(grace=0)
    worker.stop(grace=_BLOCKED_SECONDS)
    if worker.health().state != "stopped":
        logging.getLogger("conquiet.worker").error(
            "%s blocks the event loop: the process ends. Leave `async` away, and it runs in a"
            " thread",
            health.oldest,
        )
        logging.shutdown()
        os._exit(FAILED)


def make_in_child(options: dict[str, Any], logs: dict[str, str]) -> Worker:
    """Build the worker of one of several processes."""
    set_up_logs_of(logs)
    return _make(options, ExitStack(), shared=True)


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
    settings = {name: options[name] for name in _OF_ROUTERS if name in options}
    worker = Worker(source, router, sink, **settings)
    if isinstance(sink, LinesSink):
        sink.on_closed = worker.stop
    return _adjust_times(worker, options)


def _adjust(worker: Worker, options: dict[str, Any]) -> Worker:
    """Apply the options that a finished worker can still take; refuse the others."""
    for name in ("source", "sink", *_OF_ROUTERS, *_OF_SOURCES):
        if name in options:
            flag = "--batch-wait-seconds" if name == "batch_wait" else f"--{name}"
            raise ConfigError(
                f"{flag.replace('_', '-')} is for routers; {options['target']} is a worker:"
                " set it where the worker is created"
            )
    return _adjust_times(worker, options)


def _adjust_times(worker: Worker, options: dict[str, Any]) -> Worker:
    worker.grace = options.get("grace", worker.grace)
    if "stuck_after" in options:
        worker.stuck_after = options["stuck_after"]
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


def logs_of(options: Namespace) -> dict[str, str]:
    """Return format and level of the logs; warnings and errors, if nothing else was chosen."""
    from conquiet.config import load

    flags = {"log_format": options.log_format, "log_level": options.log_level}
    found = load([LOG_FORMAT, LOG_LEVEL], flags, section="")
    level = found.values["log_level"]
    if getattr(options, "debug", False):
        level = "debug"
    elif found.origins["log_level"] == "default":
        level = "warning"
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
