"""Spark: the event log and the outbox as sources and sinks, and the same router on a cluster."""
