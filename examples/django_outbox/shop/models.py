"""Orders, and what the consumer has done."""

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    id = models.TextField(primary_key=True)
    amount = models.IntegerField()


class Parcel(models.Model):  # type: ignore[misc]
    order = models.TextField()


class Handled(models.Model):  # type: ignore[misc]
    """The inbox of the consumer: what took effect, in the transaction of the effect."""

    message = models.TextField(primary_key=True)
