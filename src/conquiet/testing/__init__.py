"""For tests: messages in one line, a router without a worker, waiting without a guess.

`conquiet.testing.contracts` holds the conformance suite for a storage of one's own; it needs
pytest, this module does not.
"""

from conquiet.testing.delivery import Delivered, deliver
from conquiet.testing.messages import message
from conquiet.testing.waiting import eventually

__all__ = ["Delivered", "deliver", "eventually", "message"]
