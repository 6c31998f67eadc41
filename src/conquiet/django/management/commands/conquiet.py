"""`manage.py conquiet`: run or describe the app that the settings name, and its schedules."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from conquiet.cli import main
from conquiet.django.app import find_app
from conquiet.errors import ConfigError

_COMMANDS = {"run": ("run",), "describe": ("app", "describe"), "schedule": ("schedule",)}


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    help = (
        "run: worker and relay of CONQUIET_APP, as `conquiet run`, until a signal comes;"
        " describe: what it receives and sends, as `conquiet app describe`;"
        " schedule list|pause|resume|run|forget: its schedules, as `conquiet schedule`."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("command", choices=tuple(_COMMANDS))
        parser.add_argument("options", nargs=REMAINDER, help="those of the command; run --help")

    def handle(self, *, command: str, options: list[str], **unused: Any) -> None:
        try:
            find_app()
        except ConfigError as error:
            raise CommandError(str(error)) from error
        verbs = options[: command == "schedule"]  # it comes before the app
        rest = options[len(verbs) :]
        code = main([*_COMMANDS[command], *verbs, settings.CONQUIET_APP, *rest])
        if code:
            sys.exit(code)
