"""The event log on Spark: Redis Streams as the format `conquiet`."""
