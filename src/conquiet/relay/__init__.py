"""Relay: publishes an outbox to a sink, and marks the rows that the sink confirmed."""

from conquiet.relay.relay import Outcome, Relay, publish_batch

__all__ = ["Outcome", "Relay", "publish_batch"]
