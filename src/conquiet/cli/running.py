"""What `conquiet worker run` does: make the worker, run it, tell how it went."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conquiet.cli.addresses import (
    Reading,
    is_shareable,
    open_sink,
    open_source,
    refuse_one_file_for_both,
)
from conquiet.cli.logs import LineFormatter
from conquiet.cli.terminal import FAILED, OK, has_colour, print_json, red
from conquiet.errors import ConfigError
from conquiet.jsonlines import LinesSink, LinesSource
from conquiet.processes import resolve, run_processes
from conquiet.router import Router
from conquiet.worker import Worker

_OF_ROUTERS = ("batch_size", "batch_wait", "threads", "ordered")
_OF_LINES = ("dead_letters", "tries", "max_line_bytes")
_GRACE_SECONDS = 30.0


def run(options: Namespace) -> int:
    debug = getattr(options, "debug", False)
    chosen = {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in ("run", "json", "debug", "processes")
    }
    _search_here()
    if options.processes:
        grace = chosen.pop("grace", _GRACE_SECONDS)
        arguments = {"options": chosen, "debug": debug}
        _set_up_logs(debug)
        return run_processes(
            "conquiet.cli.running:make_in_child", options.processes, grace, arguments=arguments
        )
    with ExitStack() as files:
        worker = _make(chosen, files)
        if "stuck_after" in chosen and worker.on_stuck is None:
            worker.on_stuck = lambda health: worker.stop(grace=0)
        _set_up_logs(debug, quiet_nacks=isinstance(worker.source, LinesSource))
        return _run(worker, options.json)


def make_in_child(options: dict[str, Any], debug: bool) -> Worker:
    """The worker of one of several processes."""
    _set_up_logs(debug)
    return _make(options, ExitStack(), shared=True)


def _search_here() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _make(options: dict[str, Any], files: ExitStack, shared: bool = False) -> Worker:
    target = options["target"]
    found = resolve(target)
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
    source_url, sink_url = options.get("source", "-"), options.get("sink", "-")
    if shared and not is_shareable(source_url):
        from conquiet.relay.masked import masked

        where = "stdin" if source_url == "-" else masked(source_url)
        raise ConfigError(
            f"--processes: {where} is read by one process;"
            " use --threads, or a target that makes a Worker with a source of its own"
        )
    refuse_one_file_for_both(source_url, sink_url)
    letters = options.get("dead_letters")
    reading = Reading(
        dead_letters=Path(letters) if letters else None,
        tries=options.get("tries"),
        max_line_bytes=options.get("max_line_bytes"),
        files=files,
    )
    source = open_source(source_url, reading)
    sink = open_sink(sink_url, files)
    settings = {name: options[name] for name in _OF_ROUTERS if name in options}
    worker = Worker(source, router, sink, **settings)
    if isinstance(sink, LinesSink):
        sink.on_closed = worker.stop
    return _adjust_times(worker, options)


def _adjust(worker: Worker, options: dict[str, Any]) -> Worker:
    """Give a finished worker the options that it can still take."""
    for name in ("source", "sink", *_OF_ROUTERS, *_OF_LINES):
        if name in options:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for routers; {options['target']} is a worker:"
                " set it where the worker is made"
            )
    return _adjust_times(worker, options)


def _adjust_times(worker: Worker, options: dict[str, Any]) -> Worker:
    worker.grace = options.get("grace", worker.grace)
    if "stuck_after" in options:
        worker.stuck_after = options["stuck_after"]
    return worker


# --- one process ----------------------------------------------------------------------------


def _run(worker: Worker, as_json: bool) -> int:
    started = time.monotonic()
    with _Progress(worker):
        finished = worker.run()
    summary = _summary(worker, finished, time.monotonic() - started)
    if as_json:
        print_json(summary, sys.stderr)
    else:
        print(_sentence(summary), file=sys.stderr)
    return OK if summary["ok"] else FAILED


def _summary(worker: Worker, finished: bool, seconds: float) -> dict[str, Any]:
    health = worker.health()
    summary: dict[str, Any] = {
        "handled": health.handled - health.failed,
        "failed": health.failed,
        "unhandled": 0,
        "finished": finished,
        "seconds": round(seconds, 3),
    }
    if isinstance(worker.source, LinesSource):  # it knows lines, where a worker knows deliveries
        summary["handled"] = worker.source.acked
        summary["failed"] = worker.source.dead - worker.source.unhandled
        summary["unhandled"] = worker.source.unhandled
        failed = summary["failed"] + summary["unhandled"]
        return {"ok": finished and not failed, **summary}
    return {"ok": finished, **summary}


def _sentence(summary: dict[str, Any]) -> str:
    parts = [f"handled {summary['handled']:,}", f"failed {summary['failed']:,}"]
    if summary["unhandled"]:
        parts.append(f"put aside unhandled {summary['unhandled']:,}")
    if not summary["finished"]:
        parts.append("stopped before all was finished")
    text = f"{', '.join(parts)}, in {summary['seconds']:.1f} s"
    return text if summary["ok"] else red(text, sys.stderr)


class _Progress:
    """A line on the terminal that tells every half second how far the worker is."""

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


class _Short(LineFormatter):
    """Without tracebacks: the message tells what failed, and `--debug` where."""

    def format(self, record: logging.LogRecord) -> str:
        short = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        return super().format(short)


def _set_up_logs(debug: bool, quiet_nacks: bool = False) -> None:
    """Log to stderr, unless the application has set up its logs itself."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    kind = LineFormatter if debug else _Short
    handler.setFormatter(kind("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
    if quiet_nacks and not debug:
        # Each try of a line would be told, and in the end its dead letter once more.
        logging.getLogger("conquiet.router").setLevel(logging.ERROR)
