"""faststream run compared.django_faststream:app; outbox, relay and inbox are written by hand."""

import asyncio

from asgiref.sync import async_to_sync, sync_to_async
from django.db import models, transaction
from django.http import HttpRequest, HttpResponse
from faststream import AckPolicy, FastStream
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.annotations import RedisStreamMessage

from compared.django_tables import Invoice, Order
from compared.tables import OrderPlaced

broker = RedisBroker("redis://localhost")
app = FastStream(broker)
orders = StreamSub("orders", group="billing", consumer="billing-1", min_idle_time=60_000)


class Event(models.Model):  # type: ignore[misc]  # Django has no types
    data = models.TextField()


class Seen(models.Model):  # type: ignore[misc]
    id = models.TextField(primary_key=True)


def place_order(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        order = Order.objects.create(id=request.POST["id"])
        Event.objects.create(data=OrderPlaced(id=order.id).model_dump_json())
    return HttpResponse(status=201)


async def send(event: Event) -> None:
    await broker.publish(event.data, stream="orders", correlation_id=str(event.id))


def publish() -> bool:
    with transaction.atomic():
        events = list(Event.objects.select_for_update(skip_locked=True).order_by("id")[:100])
        for event in events:
            async_to_sync(send)(event)
            event.delete()
    return bool(events)


@app.after_startup
async def start() -> None:
    app.context.set_global("relay", asyncio.create_task(relay()))


async def relay() -> None:
    while True:
        if not await sync_to_async(publish)():
            await asyncio.sleep(0.5)


@broker.subscriber(stream=orders, ack_policy=AckPolicy.NACK_ON_ERROR)
def bill(placed: OrderPlaced, message: RedisStreamMessage) -> None:
    with transaction.atomic():
        _, is_new = Seen.objects.get_or_create(id=message.correlation_id)
        if is_new:
            Invoice.objects.create(order=placed.id)
