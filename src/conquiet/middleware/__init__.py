"""Middlewares around handlers; each declares its stage in the chain."""

from conquiet.middleware.correlation import Correlation
from conquiet.middleware.dead_letter import DeadLetter, replay
from conquiet.middleware.deadline import Deadline
from conquiet.middleware.faults import Delay, Duplicate, FailAtRandom, InjectedFault
from conquiet.middleware.metrics import Metrics
from conquiet.middleware.per_message import per_message
from conquiet.middleware.recover import Recover
from conquiet.middleware.required import Required
from conquiet.middleware.retry import Retry
from conquiet.middleware.subject import Subject
from conquiet.middleware.tracing import Tracing
from conquiet.middleware.validate import JsonSchema

__all__ = [
    "Correlation",
    "DeadLetter",
    "Deadline",
    "Delay",
    "Duplicate",
    "FailAtRandom",
    "InjectedFault",
    "JsonSchema",
    "Metrics",
    "Recover",
    "Required",
    "Retry",
    "Subject",
    "Tracing",
    "per_message",
    "replay",
]
