"""conquiet: effects exactly once, events never lost."""

from conquiet.acking import Acking
from conquiet.errors import ConquietError
from conquiet.message import Message
from conquiet.router import Router
from conquiet.worker import Worker

__all__ = ["Acking", "ConquietError", "Message", "Router", "Worker"]
