"""Name the application for Django."""

from django.apps import AppConfig


class ConquietConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    name = "conquiet.django"
    label = "conquiet"
    verbose_name = "Messages"
    default_auto_field = "django.db.models.BigAutoField"
