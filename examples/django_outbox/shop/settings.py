"""The settings that this project needs, and no others."""

import os
from urllib.parse import unquote, urlsplit

_url = urlsplit(os.environ["DATABASE_URL"])

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "only-for-this-example")
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = ["shop"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

if _url.scheme == "sqlite":
    _database = {"ENGINE": "django.db.backends.sqlite3", "NAME": _url.path[1:]}
else:
    _database = {
        "ENGINE": "django.db.backends.postgresql",  # with psycopg 3; psycopg2 will not do
        "NAME": _url.path[1:],
        "USER": unquote(_url.username or ""),
        "PASSWORD": unquote(_url.password or ""),
        "HOST": _url.hostname or "",
        "PORT": str(_url.port or ""),
    }
# A consumer keeps its connection from message to message, and looks whether it still lives.
DATABASES = {"default": {**_database, "CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}}
