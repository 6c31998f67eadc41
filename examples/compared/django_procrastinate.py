"""manage.py procrastinate worker; the inbox is written by hand."""

from django.db import models, transaction
from django.http import HttpRequest, HttpResponse
from procrastinate import JobContext
from procrastinate.contrib.django import app as jobs

from compared.django_tables import Invoice, Order


class Seen(models.Model):  # type: ignore[misc]  # Django has no types
    id = models.BigIntegerField(primary_key=True)


def place_order(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        order = Order.objects.create(id=request.POST["id"])
        bill.defer(order=order.id)
    return HttpResponse(status=201)


@jobs.periodic(cron="* * * * *")  # type: ignore[untyped-decorator, unused-ignore]
@jobs.task(queueing_lock="retry_stalled")  # type: ignore[untyped-decorator, unused-ignore]
async def retry_stalled(timestamp: int) -> None:
    for job in await jobs.job_manager.get_stalled_jobs():
        await jobs.job_manager.retry_job(job)


@jobs.task(pass_context=True, retry=10)  # type: ignore[untyped-decorator, unused-ignore]
def bill(context: JobContext, order: str) -> None:
    with transaction.atomic():
        _, is_new = Seen.objects.get_or_create(id=context.job.id)
        if is_new:
            Invoice.objects.create(order=order)
