"""Orders and parcels."""

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    id = models.TextField(primary_key=True)
    amount = models.IntegerField()


class Parcel(models.Model):  # type: ignore[misc]
    order = models.TextField()
