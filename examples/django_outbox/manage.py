"""A Django project that stores an order and its event in one transaction.

DATABASE_URL=postgresql://… python manage.py migrate
DATABASE_URL=postgresql://… python manage.py runserver
conquiet relay run --database postgresql://…            publishes the events
DATABASE_URL=… REDIS_URL=… python manage.py consume     a consumer that uses Django's ORM
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
