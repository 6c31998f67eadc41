"""Sinks: where a relay publishes to. The Redis Stream is `conquiet.redis.StreamSink`."""

from conquiet.relay.sinks.answers import Refused
from conquiet.relay.sinks.http import HttpSink, Rejected
from conquiet.relay.sinks.kafka import KafkaSink
from conquiet.relay.sinks.kombu import KombuSink
from conquiet.relay.sinks.pubsub import PubSubSink

__all__ = [
    "HttpSink",
    "KafkaSink",
    "KombuSink",
    "PubSubSink",
    "Refused",
    "Rejected",
]
