"""The worker of compose.yaml: shows each event that the relay has published."""

from __future__ import annotations

import sys

from conquiet import Message, Router

router = Router()


@router.raw()
def show(message: Message[bytes]) -> None:
    print(message.type, message.id, message.data.decode(), file=sys.stderr, flush=True)
