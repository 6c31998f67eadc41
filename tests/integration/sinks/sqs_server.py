"""Moto's server of SQS, in threads of this process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from moto.sqs.models import SQSBackend

REGION = "eu-central-1"


@contextmanager
def serve_sqs() -> Iterator[str]:
    """Yield the endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SQSBackend, "receive_message", _receive_one_at_a_time)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


_receiving = threading.Lock()
_receive = SQSBackend.receive_message


def _receive_one_at_a_time(
    self: Any, queue: str, count: int, wait: int, *others: Any, **named: Any
) -> Any:
    """Moto has no lock: it gives a message to two receives that run at once."""
    end = time.monotonic() + wait
    while True:
        with _receiving:
            found = _receive(self, queue, count, 0, *others, **named)
        if found or time.monotonic() >= end:
            return found
        time.sleep(0.02)
