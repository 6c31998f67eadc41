"""The settings that this project needs, and no others."""

import os
from urllib.parse import unquote, urlsplit

_url = urlsplit(os.environ["DATABASE_URL"])

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "only-for-this-example")
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "conquiet.django",
    "shop",
]
CONQUIET_APP = "shop.messages:app"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

if _url.scheme == "sqlite":
    _database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _url.path[1:],
        "OPTIONS": {
            "init_command": "PRAGMA journal_mode=WAL",  # readers do not wait for the writer
            "transaction_mode": "IMMEDIATE",
            "timeout": 10,
        },
    }
else:
    _database = {
        "ENGINE": "django.db.backends.postgresql",  # with psycopg 3; psycopg2 will not do
        "NAME": _url.path[1:],
        "USER": unquote(_url.username or ""),
        "PASSWORD": unquote(_url.password or ""),
        "HOST": _url.hostname or "",
        "PORT": str(_url.port or ""),
    }
DATABASES = {"default": _database}
