"""`conquiet schedule list|pause|resume|run|forget`: what an app does on a schedule."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conquiet.cli.app import load_app
from conquiet.cli.options import Verb, add_group, add_verb
from conquiet.cli.terminal import OK, green, print_json, print_table, printable

_TARGET = """
TARGET is module:name of an App, looked up from the current directory. The state is in its database.
"""


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "schedule",
        "what an app does on a schedule: next times, pause, run now",
        "conquiet schedule list shop:app",
    )
    for verb in _VERBS:
        parser = add_verb(verbs, common, verb)
        parser.add_argument("target", metavar="TARGET", help="module:name, such as shop:app")
        if verb.name != "list":
            parser.add_argument("name", metavar="NAME", help="of the schedule")


def _list(options: Namespace) -> int:
    with _schedules(options) as schedules:
        found = [_describe(entry) for entry in schedules.list()]
    if options.json:
        print_json(found)
    elif not found:
        print("the app has no schedules; add one by @app.every")
    else:
        columns = ("name", "definition", "next", "last", "missed", "state")
        rows = [[printable(str(row[column] or "")) for column in columns] for row in found]
        print_table(columns, rows)
    return OK


def _describe(entry: Any) -> dict[str, Any]:
    return {
        "name": entry.name,
        "definition": entry.definition,
        "next": entry.next_text,
        "last": entry.last_text,
        "missed": None if entry.schedule is None else entry.schedule.missed,
        "state": f"{entry.status}, changed in code" if entry.is_changed else entry.status,
    }


def _pause(options: Namespace) -> int:
    return _set_paused(options, True)


def _resume(options: Namespace) -> int:
    return _set_paused(options, False)


def _set_paused(options: Namespace, is_paused: bool) -> int:
    with _schedules(options) as schedules:
        is_changed = schedules.set_paused(options.name, is_paused)
    state = "paused" if is_paused else "active"
    if options.json:
        print_json({"ok": True, "name": options.name, "state": state, "changed": is_changed})
    else:
        already = "" if is_changed else " already"
        print(green(f"{printable(options.name)} is{already} {state}", sys.stdout))
    return OK


def _run(options: Namespace) -> int:
    with _schedules(options) as schedules:
        id_ = schedules.run(options.name)
    if options.json:
        print_json({"ok": True, "name": options.name, "id": id_})
    else:
        print(f"{printable(id_)} is in the log; a worker of the app handles it")
    return OK


def _forget(options: Namespace) -> int:
    with _schedules(options) as schedules:
        schedules.forget(options.name)
    if options.json:
        print_json({"ok": True, "name": options.name})
    else:
        print(f"the state of {printable(options.name)} is removed")
    return OK


@contextmanager
def _schedules(options: Namespace) -> Iterator[Any]:
    app = load_app(options.target)
    try:
        app.check_tables()
        yield app.schedules
    finally:
        app.close()


_CODES = "0 done; 1 there is no such schedule, or the database is out of reach; 2 wrong usage"
_VERBS = (
    Verb(
        "list",
        "the schedules of an app: next and last time, and those that its code has no longer",
        ("conquiet schedule list shop:app", "conquiet schedule list shop:app --json"),
        "0 listed; 1 the database is out of reach; 2 wrong usage, or a missing table",
        _list,
        f"""{_TARGET}
States: active; paused; new (no process with it has started yet); stale (the code has it no longer;
`forget` removes it). Times are in UTC.
""",
    ),
    Verb(
        "pause",
        "pause a schedule: no ticks until it is resumed",
        ("conquiet schedule pause shop:app send_report",),
        _CODES,
        _pause,
        f"{_TARGET}\nA tick that is in the log already is handled.\n",
    ),
    Verb(
        "resume",
        "resume a paused schedule: from its next time on",
        ("conquiet schedule resume shop:app send_report",),
        _CODES,
        _resume,
        f"{_TARGET}\nThe ticks of the pause are not made up for.\n",
    ),
    Verb(
        "run",
        "run a schedule now, once: its regular times stay as they are",
        ("conquiet schedule run shop:app send_report",),
        _CODES,
        _run,
        f"{_TARGET}\nIt writes a tick into the log, which a worker of the app handles.\n",
    ),
    Verb(
        "forget",
        "remove the state of a stale schedule",
        ("conquiet schedule forget shop:app old_report",),
        "0 done; 1 there is no such schedule, or the database is out of reach; 2 the code has it",
        _forget,
        _TARGET,
    ),
)
