"""The messages of the shop, and what it does with them."""

import os

import msgspec

from conquiet.django import App
from shop.models import Parcel

app = App("shop", broker=os.environ.get("BROKER_URL"))


class OrderPlaced(msgspec.Struct):
    order: str
    amount: int


class ParcelSent(msgspec.Struct):
    order: str


@app.on
def send_parcel(placed: OrderPlaced) -> ParcelSent:
    Parcel.objects.create(order=placed.order)
    return ParcelSent(placed.order)
