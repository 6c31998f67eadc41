"""Send a parcel for each order that the relay has published, until SIGTERM or Ctrl-C."""

from typing import Any

from django.core.management.base import BaseCommand

from shop.consumer import make_worker


class Command(BaseCommand):  # type: ignore[misc]
    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        make_worker().run()
