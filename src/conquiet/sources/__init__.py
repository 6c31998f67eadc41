"""Sources on brokers, by URL. A Redis Stream is read by `conquiet.redis.StreamSource`."""

from conquiet.sources.amqp import AmqpSource
from conquiet.sources.kafka import KafkaSource

__all__ = ["AmqpSource", "KafkaSource"]
