"""Sources on brokers, by URL. A Redis Stream is read by `conquiet.redis.StreamSource`."""

from conquiet.sources.amqp import AmqpSource
from conquiet.sources.kafka import KafkaSource
from conquiet.sources.sqs import SqsSource

__all__ = ["AmqpSource", "KafkaSource", "SqsSource"]
