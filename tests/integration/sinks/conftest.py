"""The RabbitMQ of the tests of sinks and sources."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.sinks.rabbitmq import RabbitMQ


@pytest.fixture(scope="session")
def server() -> Iterator[RabbitMQ]:
    broker = RabbitMQ()
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
