"""A consumer whose effects are Django's: the inbox is a model, in the transaction of the effect."""

import os

import redis
from django.db import InterfaceError, OperationalError, close_old_connections, transaction

from conquiet import Message, Router, Worker
from conquiet.errors import StoreError
from conquiet.redis import StreamSource
from shop.models import Handled, Parcel
from shop.outbox import OrderPlaced

router = Router()


@router.event()
def send_parcel(event: OrderPlaced, message: Message[OrderPlaced]) -> None:
    close_old_connections()  # outside a request, Django does not check whether it still works
    try:
        with transaction.atomic():
            _, is_fresh = Handled.objects.get_or_create(message=message.identity)
            if is_fresh:
                Parcel.objects.create(order=event.order)
    except (InterfaceError, OperationalError) as error:
        raise StoreError(f"the database is away: {error}") from error  # costs no attempt


def make_worker() -> Worker:
    client = redis.Redis.from_url(os.environ["REDIS_URL"])
    source = StreamSource(
        client, "orders", group="parcels", max_attempts=10, dead_letters="orders:dead"
    )
    return Worker(source, router)
