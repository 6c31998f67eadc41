"""celery -A … worker -B; outbox, relay and inbox are written by hand."""

from typing import Any

from celery import Celery
from django.db import models, transaction
from django.http import HttpRequest, HttpResponse

from compared.django_tables import Invoice, Order
from compared.tables import OrderPlaced

celery = Celery("shop", broker="redis://localhost")
celery.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)
celery.conf.beat_schedule = {"publish": {"task": "publish", "schedule": 0.5}}


class Event(models.Model):  # type: ignore[misc]  # Django has no types
    data = models.TextField()


class Seen(models.Model):  # type: ignore[misc]
    id = models.TextField(primary_key=True)


def place_order(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        order = Order.objects.create(id=request.POST["id"])
        Event.objects.create(data=OrderPlaced(id=order.id).model_dump_json())
    return HttpResponse(status=201)


@celery.task(name="publish")  # type: ignore[untyped-decorator]
def publish() -> None:
    with transaction.atomic():
        for event in Event.objects.select_for_update(skip_locked=True).order_by("id")[:100]:
            bill.apply_async([event.data], task_id=str(event.id))
            event.delete()


@celery.task(bind=True, autoretry_for=(Exception,))  # type: ignore[untyped-decorator]
def bill(task: Any, data: str) -> None:
    placed = OrderPlaced.model_validate_json(data)
    with transaction.atomic():
        _, is_new = Seen.objects.get_or_create(id=task.request.id)
        if is_new:
            Invoice.objects.create(order=placed.id)
