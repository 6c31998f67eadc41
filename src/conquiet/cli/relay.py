"""`conquiet relay run`: publish an outbox."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from typing import Any

from conquiet.cli.options import add_group, add_settings, flags_of, print_settings
from conquiet.cli.terminal import FAILED, OK
from conquiet.cli.worker import record_history
from conquiet.config import CONFIG_VARIABLE
from conquiet.relay.settings import SETTINGS, load

_RUN = f"""\
Publish the rows of an outbox until a signal comes: claim rows, publish them, mark those that the
sink confirmed. Several relays may run side by side.

--from wal follows PostgreSQL's write-ahead log instead: sooner, and without marks; one relay
reads, others wait to take over. --from claim changes back. auto, the default, takes the log if
wal_level is logical, max_slot_wal_keep_size is set and the user may replicate, or if a relay took
it before.

A setting is a flag, else a variable of the environment, else a line of the TOML file that
--config or {CONFIG_VARIABLE} names, in its table [relay]; else its default.
"""
_EPILOG = """\
examples:
  conquiet relay run --database postgresql://app@localhost/shop --sink redis://localhost/0
  CONQUIET_OUTBOX_PUBLISH_BATCH_SIZE=200 conquiet relay run --config relay.toml
  conquiet relay run --database postgresql://app@localhost/shop --sink redis: --from wal
  conquiet relay run --database sqlite:///shop.db --sink stdout: --until-empty

SIGTERM or Ctrl-C finishes the batch in flight. A second one, or the end of the grace time,
abandons it: its rows will be published again.

exit codes:
  0  stopped, with nothing in flight; with --until-empty, everything was published
  1  a batch was abandoned or stuck; with --until-empty, something was not published
  2  wrong usage or settings
"""


def register(commands: Any, common: ArgumentParser) -> None:
    example = "conquiet relay run --database postgresql://app@localhost/shop --sink redis:"
    verbs = add_group(commands, "relay", "publish an outbox", example)
    run = verbs.add_parser(
        "run",
        help="publish an outbox until a signal comes",
        description=_RUN,
        epilog=_EPILOG,
        parents=[common],
    )
    run.set_defaults(run=_run)
    add_settings(run, SETTINGS)
    run.add_argument(
        "--until-empty",
        action="store_true",
        help="publish the rows that wait, then end; no health server",
    )
    run.add_argument("--json", action="store_true", help="--print-settings in JSON")


def _run(options: Namespace) -> int:
    flags = flags_of(options, SETTINGS)
    if options.until_empty:
        flags["health"] = "off"
    settings = load(flags, file=options.config)
    if options.print_settings:
        return print_settings(SETTINGS, settings.texts, settings.origins, options.json)
    from conquiet.cli.logs import set_up_logs
    from conquiet.relay.process import RelayProcess

    is_debug = getattr(options, "debug", False)
    set_up_logs("debug" if is_debug else settings.log_level, settings.log_format)
    _log_settings(settings)
    process = RelayProcess(settings)
    with ExitStack() as open_:
        if settings.history and not options.until_empty:
            record_history([], open_, process.relay, settings.table)
        code = process.run_until_empty() if options.until_empty else process.run()
    return FAILED if code else OK


def _log_settings(settings: Any) -> None:
    """Log the settings: one line of JSON, or a line per setting."""
    import logging

    logger = logging.getLogger("conquiet.relay")
    if settings.log_format == "json":
        logger.info("relay starts", extra={"settings": dict(settings.texts)})
        return
    logger.info("relay starts")
    for line in settings.list_lines():
        logger.info("  %s", line)
