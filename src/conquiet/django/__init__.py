"""An app on Django's own connection: add `conquiet.django` to INSTALLED_APPS.

Django's migrations create the tables, the admin shows outbox and dead letters, and
`manage.py conquiet run` works.
"""

from conquiet.config import missing_extra

try:
    import django  # noqa: F401
except ImportError as error:
    raise missing_extra(error, "django") from error

from conquiet.django.app import App

__all__ = ["App"]
