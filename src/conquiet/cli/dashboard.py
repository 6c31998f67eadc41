"""`conquiet dashboard`: the web page."""

from __future__ import annotations

import logging
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

from conquiet.cli.app import load_app
from conquiet.cli.logs import set_up_logs
from conquiet.cli.options import add_setting
from conquiet.cli.terminal import OK, dim, print_json
from conquiet.web.settings import SETTINGS, TOKEN_VARIABLE, Settings, access_of, load

_ABOUT = f"""\
Serve a web page that shows streams, groups, the outbox, dead letters, relays and workers, traces
an event, and retries, replays and drops.

Users sign in by a token, which is printed at the start with a link; {TOKEN_VARIABLE} or
--token-file set it. It listens on this machine only, unless --host is given.

A setting is a flag, else a variable of the environment, else a line of the TOML file that
CONQUIET_CONFIG names, in its table [dashboard]; else its default.
"""
_EPILOG = """\
examples:
  conquiet dashboard --database postgresql://app@localhost/shop --broker redis://localhost/0
  conquiet dashboard --read-only --hide-payloads
  conquiet dashboard --database sqlite:///shop.db --app shop:app
  CONQUIET_DASHBOARD_TOKEN=… conquiet dashboard --host 0.0.0.0 --allowed-hosts ops.example.com

SIGTERM or Ctrl-C ends it.

exit codes:
  0  it was ended by a signal
  1  it failed
  2  wrong usage or settings, or the port is taken
"""


def register(commands: Any, common: ArgumentParser) -> None:
    parser = commands.add_parser(
        "dashboard",
        help="serve the web page",
        description=_ABOUT,
        epilog=_EPILOG,
        parents=[common],
    )
    parser.set_defaults(run=_run)
    for setting in SETTINGS:
        add_setting(parser, setting, SUPPRESS)
    parser.add_argument(
        "--no-auth",
        dest="auth",
        action="store_const",
        const="none",
        default=SUPPRESS,
        help="no authentication, on loopback alone",
    )
    parser.add_argument(
        "--print-settings", action="store_true", help="print the settings it would run with"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the address, or --print-settings, in JSON"
    )


def _run(options: Namespace) -> int:
    names = [setting.name for setting in SETTINGS]
    settings = load({name: getattr(options, name) for name in names if hasattr(options, name)})
    if options.print_settings:
        shown = settings.describe()
        if options.json:
            print_json(shown)
        else:
            width = max(map(len, shown))
            print("\n".join(f"{name:<{width}} = {value}" for name, value in shown.items()))
        return OK
    level = logging.DEBUG if getattr(options, "debug", False) else logging.INFO
    set_up_logs(logging.getLevelName(level))
    for noisy in ("uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if level == logging.DEBUG else "WARNING")
    from conquiet.web import dashboard  # raises if a package is missing

    access, is_new = access_of(settings)
    app = dashboard(
        database=settings.database or None,
        broker=settings.broker or None,
        table=settings.table,
        max_attempts=settings.max_attempts,
        streams=settings.streams,
        relays=settings.relays,
        auth=access,
        read_only=settings.read_only,
        hide_payloads=settings.hide_payloads,
        allowed_hosts=settings.allowed_hosts,
        public_url=settings.public_url,
        app=load_app(settings.app) if settings.app else None,
    )
    from conquiet.web.server import serve

    token = getattr(access, "token", "") if is_new else ""

    def announce(port: int) -> None:
        _print_address(settings, port, token, app.stores.describe(), options.json)

    serve(app, settings.host, settings.port, settings.public_url, announce)
    return OK


def _print_address(
    settings: Settings, port: int, token: str, stores: list[tuple[str, str]], as_json: bool
) -> None:
    """Print the address and how to sign in; the token only if it was created here."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(settings.host, settings.host)
    url = settings.public_url.rstrip("/") or f"http://{host}:{port}"
    enter = f"{url}/login?token={token}" if token else f"{url}/"
    if as_json:
        print_json({"url": f"{url}/", "enter": enter, "read_only": settings.read_only})
        sys.stdout.flush()
        return
    print(f"dashboard: {enter}")
    for name, address in stores:
        print(dim(f"  {name:<9} {address}", sys.stdout))
    if settings.auth == "token" and not token:
        print(dim("  sign in by the token that was set", sys.stdout))
    print(dim("  Ctrl-C ends it", sys.stdout), flush=True)
