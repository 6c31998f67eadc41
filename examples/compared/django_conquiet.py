"""CONQUIET_APP = "compared.django_conquiet:app", and manage.py conquiet run"""

from django.db import transaction
from django.http import HttpRequest, HttpResponse

from compared.django_tables import Invoice, Order
from compared.tables import OrderPlaced
from conquiet.django import App

app = App("shop")


def place_order(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        order = Order.objects.create(id=request.POST["id"])
        app.emit(OrderPlaced(id=order.id))
    return HttpResponse(status=201)


@app.on
def bill(placed: OrderPlaced) -> None:
    Invoice.objects.create(order=placed.id)
