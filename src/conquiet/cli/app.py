"""`conquiet run`: the workers and the relay of an app, in one process; and `conquiet app`."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conquiet.cli.options import add_group, add_settings, print_settings, search_here
from conquiet.cli.settings import OF_WORKERS, SETTINGS
from conquiet.cli.terminal import FAILED, OK, print_json, printable
from conquiet.cli.worker import (
    Probes,
    count_messages,
    load_worker_settings,
    logs_of,
    sentence_of,
    set_up_logs_of,
    stop_stuck,
)
from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from conquiet.app import App
    from conquiet.app.app import Running

_RUN = """\
Run an app until a signal comes: its worker, and its relay if it has a broker.

TARGET is module:name, looked up from the current directory; the name is that of an App.

One process is enough to try it; start several, on one machine or on many, to do more. They share
the work. --only separates workers and relays.
"""

_EPILOG = """\
examples:
  conquiet run shop:app --create-tables
  conquiet run shop:app --threads 4 --health 127.0.0.1:8080
  conquiet run shop:app --only relay

The first SIGTERM or Ctrl-C lets messages in flight finish. A second one abandons them: they are
delivered again. After a kill, another process takes over when the lease of the dead one ends.

exit codes:
  0  stopped, and everything in flight was finished
  1  something in flight was abandoned, or a part of it ended by itself
  2  wrong usage or settings, or a missing table
"""


def register(commands: Any, common: ArgumentParser) -> None:
    run = commands.add_parser(
        "run",
        help="run an app: worker and relay",
        description=_RUN,
        epilog=_EPILOG,
        parents=[common],
    )
    run.set_defaults(run=_run)
    run.add_argument("target", metavar="TARGET", help="module:name, such as shop:app")
    run.add_argument(
        "--create-tables", action="store_true", help="create missing tables before the start"
    )
    run.add_argument("--only", choices=("worker", "relay"), help="one of the two; else both")
    add_settings(run, OF_WORKERS)
    run.add_argument("--json", action="store_true", help="the summary, on stderr, as JSON")

    _register_describe(commands, common)


_DESCRIBE = """\
Print what an app receives and sends: an AsyncAPI 3 document with JSON Schemas, in JSON. With
--check, compare it with an earlier one.

TARGET is module:name, looked up from the current directory; the name is that of an App. No server
is needed.

--check FILE prints a line for each change that breaks other services: a message that is no longer
received or sent, a removed field, a narrower type, a field that is required now in what the app
receives, a wider type or a field that may be missing in what it sends, a renamed handler.
"""

_DESCRIBE_EPILOG = """\
examples:
  conquiet app describe shop:app > shop.asyncapi.json
  conquiet app describe shop:app --check shop.asyncapi.json

exit codes:
  0  described, or nothing breaks
  1  a change breaks other services
  2  wrong usage, or the file is no AsyncAPI document
"""


def _register_describe(commands: Any, common: ArgumentParser) -> None:
    example = "conquiet app describe shop:app"
    verbs = add_group(commands, "app", "describe an app", example)
    describe = verbs.add_parser(
        "describe",
        help="print AsyncAPI, or find what breaks",
        description=_DESCRIBE,
        epilog=_DESCRIBE_EPILOG,
        parents=[common],
    )
    describe.set_defaults(run=_describe)
    describe.add_argument("target", metavar="TARGET", help="module:name, such as shop:app")
    describe.add_argument(
        "--interface-version",
        default="1.0.0",
        metavar="VERSION",
        help="the version that the document states (1.0.0)",
    )
    describe.add_argument(
        "--check", type=Path, metavar="FILE", help="an earlier document, to compare with"
    )
    describe.add_argument("--json", action="store_true", help="the result of --check as JSON")


def _describe(options: Namespace) -> int:
    from conquiet.app.description import find_breaks, read_document

    document = load_app(options.target).describe(options.interface_version)
    if options.check is None:
        print_json(document)
        return OK
    breaks = find_breaks(read_document(options.check), document)
    if options.json:
        print_json({"ok": not breaks, "breaks": breaks})
    elif breaks:
        print(*map(printable, breaks), sep="\n")
    else:
        print(f"nothing breaks services that know {options.check}")
    return FAILED if breaks else OK


_OF_WORKERS = {
    "batch_size": "batch_size",
    "threads": "threads",
    "concurrency": "concurrency",
    "ordered": "ordered",
    "grace_seconds": "grace",
    "stuck_after_seconds": "stuck_after",
}
"""Names of settings, and of what a worker takes."""


def _run(options: Namespace) -> int:
    from conquiet.processes import exclude_loaded_objects

    found = load_worker_settings(options, SETTINGS)
    if options.print_settings:
        return print_settings(OF_WORKERS, found.texts, found.origins, options.json)
    app = load_app(options.target)
    set_up_logs_of(logs_of(options, found))
    probes = Probes(found)
    given = found.given()
    chosen = {of: given[name] for name, of in _OF_WORKERS.items() if name in given}
    if "threads" in chosen and ("concurrency" in chosen or app.is_async):
        raise ConfigError(
            "--threads: this app runs on an event loop; use --concurrency for how many transactions"
            " are in flight at once"
        )
    if options.create_tables:
        app.create_tables()
    running = app.open(
        worker=options.only != "relay",
        relay=options.only != "worker",
        history=found.values["history"],
        **chosen,
    )
    if "stuck_after" in chosen:
        for worker in running.workers:
            worker.on_stuck = partial(stop_stuck, worker)
    started = time.monotonic()
    with ExitStack() as open_:
        where = _serve_health(app, running, probes, open_)
        open_.enter_context(exclude_loaded_objects())
        finished = running.run(is_async=app.is_async, ready=partial(_report, app, running, where))
    summary = _summary(running, finished, time.monotonic() - started)
    if options.json:
        print_json(summary, sys.stderr)
    else:
        print(sentence_of(summary), file=sys.stderr)
    return OK if finished else FAILED


def load_app(target: str) -> App:
    """Return the app that MODULE:NAME names, looked up from the current directory."""
    from conquiet.app import App
    from conquiet.processes import resolve

    search_here()
    found = resolve(target)
    if not isinstance(found, App):
        raise ConfigError(f"{target} is {found!r:.80}; it must be an App")
    return found


def _serve_health(app: App, running: Running, probes: Probes, open_: ExitStack) -> str:
    if probes.address is None:
        return ""
    from conquiet.app.app import make_health

    count_messages(running.workers)
    health = make_health(app, running.find_trouble, details=probes.details, relay=running.relay)
    return f"; health is at {probes.serve(health, open_)}"


def _report(app: App, running: Running, where: str) -> None:
    parts = [f"worker on {', '.join(app.topics)}"] if running.workers else []
    parts += ["relay"] if running.relay is not None else []
    print(f"{app.name}: {' and '.join(parts)} started{where}; Ctrl-C stops", file=sys.stderr)
    sys.stderr.flush()


def _summary(running: Running, finished: bool, seconds: float) -> dict[str, Any]:
    health = running.health()
    failed = sum(one.failed for one in health)
    return {
        "ok": finished,
        "handled": sum(one.handled for one in health) - failed,
        "failed": failed,
        "unhandled": 0,
        "published": 0 if running.relay is None else running.relay.published,
        "finished": finished,
        "seconds": round(seconds, 3),
    }
