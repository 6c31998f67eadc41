"""Show the rows of the outbox and the dead letters to the admin; conquiet itself writes them."""

from django.db import models


class OutboxEvent(models.Model):  # type: ignore[misc]  # Django has no types
    """One row of the outbox."""

    id = models.BigAutoField(primary_key=True)
    created_at = models.DateTimeField()
    topic = models.TextField()
    event_type = models.TextField()
    event_id = models.TextField()
    key = models.TextField(null=True)
    content_type = models.TextField()
    data = models.BinaryField()
    attributes = models.JSONField()
    attempts = models.IntegerField()
    last_error = models.TextField(null=True)
    published_at = models.DateTimeField(null=True)
    parked_at = models.DateTimeField(null=True)

    class Meta:
        managed = False
        db_table = "outbox"
        verbose_name = "outbox event"

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id}"


class DeadLetter(models.Model):  # type: ignore[misc]  # Django has no types
    """One message that the app has failed to handle; its id is that of the outbox row."""

    event = models.OneToOneField(
        OutboxEvent, models.DO_NOTHING, primary_key=True, db_column="id", db_constraint=False
    )
    consumer_group = models.TextField()
    topic = models.TextField()
    attempts = models.IntegerField()
    last_error = models.TextField(null=True)
    traceback = models.TextField(null=True)
    dead_at = models.DateTimeField(null=True)

    class Meta:
        managed = False
        db_table = "outbox_retries"
        verbose_name = "dead letter"

    def __str__(self) -> str:
        return f"{self.event}: {self.last_error}"
