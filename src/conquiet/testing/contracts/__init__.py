"""The conformance suite: what every source, sink, inbox, outbox and transaction must do.

Subclass a contract, say how to open yours, and run pytest:

    class TestMySource(SourceContract):
        def open(self, lease): ...
        def publish(self, messages): ...

Each test gets an instance of its own; a fixture of yours prepares an empty storage for it.
Letters and numbers in the tests (A1, S4, R5) name the trap that each one guards against.
"""

import pytest

for _module in ("consuming", "inbox", "machine", "outbox", "replaying", "samples"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")
for _module in ("sink", "source", "storing", "transaction", "worker"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from conquiet.testing.contracts.inbox import InboxContract  # noqa: E402
from conquiet.testing.contracts.outbox import OutboxContract  # noqa: E402
from conquiet.testing.contracts.sink import SinkContract  # noqa: E402
from conquiet.testing.contracts.source import SourceContract  # noqa: E402
from conquiet.testing.contracts.transaction import TransactionContract  # noqa: E402
from conquiet.testing.contracts.worker import WorkerContract  # noqa: E402

__all__ = [
    "InboxContract",
    "OutboxContract",
    "SinkContract",
    "SourceContract",
    "TransactionContract",
    "WorkerContract",
]
