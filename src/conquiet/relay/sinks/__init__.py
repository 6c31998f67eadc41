"""Sinks of a relay, and how to open one by URL. `conquiet.redis.StreamSink` is the Redis Stream."""

from conquiet.errors import Refused
from conquiet.relay.sinks.celery import CelerySink
from conquiet.relay.sinks.http import HttpSink, Rejected
from conquiet.relay.sinks.kafka import KafkaSink
from conquiet.relay.sinks.kombu import KombuSink
from conquiet.relay.sinks.pubsub import PubSubSink

__all__ = [
    "CelerySink",
    "HttpSink",
    "KafkaSink",
    "KombuSink",
    "PubSubSink",
    "Refused",
    "Rejected",
]
