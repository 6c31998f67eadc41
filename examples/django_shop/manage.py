"""A Django project that stores an order and its event in one transaction, and sends each once.

DATABASE_URL=postgresql://… python manage.py migrate
DATABASE_URL=postgresql://… python manage.py runserver
DATABASE_URL=postgresql://… python manage.py conquiet run      sends parcels
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
