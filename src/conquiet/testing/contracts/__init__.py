"""The conformance suite for sources, sinks, inboxes, outboxes and transactions.

Subclass a contract, define how to open yours, and run pytest:

    class TestMySource(SourceContract):
        def open(self, lease): ...
        def publish(self, messages): ...

Each test gets an instance of its own; a fixture of yours prepares an empty storage for it.
"""

import pytest

for _module in (
    "delay",
    "inbox",
    "outbox",
    "promotion",
    "sink",
    "source",
    "transaction",
    "worker",
):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from conquiet.testing.contracts.delay import DelayContract  # noqa: E402
from conquiet.testing.contracts.inbox import InboxContract  # noqa: E402
from conquiet.testing.contracts.outbox import OutboxContract  # noqa: E402
from conquiet.testing.contracts.promotion import PromotionContract  # noqa: E402
from conquiet.testing.contracts.sink import SinkContract  # noqa: E402
from conquiet.testing.contracts.source import SourceContract  # noqa: E402
from conquiet.testing.contracts.transaction import TransactionContract  # noqa: E402
from conquiet.testing.contracts.worker import WorkerContract  # noqa: E402

__all__ = [
    "DelayContract",
    "InboxContract",
    "OutboxContract",
    "PromotionContract",
    "SinkContract",
    "SourceContract",
    "TransactionContract",
    "WorkerContract",
]
