"""`manage.py conquiet run`: worker and relay of the app that the settings name."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from conquiet.cli import main
from conquiet.django.app import find_app
from conquiet.errors import ConfigError


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    help = "Run worker and relay of CONQUIET_APP, as `conquiet run` does, until a signal comes."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("command", choices=("run",))
        parser.add_argument("options", nargs=REMAINDER, help="those of conquiet run; run --help")

    def handle(self, *, command: str, options: list[str], **unused: Any) -> None:
        try:
            find_app()
        except ConfigError as error:
            raise CommandError(str(error)) from error
        code = main([command, settings.CONQUIET_APP, *options])
        if code:
            sys.exit(code)
