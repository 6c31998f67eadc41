"""The models that the programs in Django share, not counted; compared is in INSTALLED_APPS."""

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    id = models.TextField(primary_key=True)


class Invoice(models.Model):  # type: ignore[misc]
    order = models.TextField()
