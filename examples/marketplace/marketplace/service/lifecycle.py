"""The states of orders, lines, licenses and ads, and their transitions.

docs/marketplace.md draws them; the tables check the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from conquiet.errors import ConquietError, PermanentError


class Refused(PermanentError):
    """A command breaks a rule; a retry would break it again."""


class IllegalTransition(Refused):
    """The state has no transition to the one that the command asks for."""


class WrongAmount(Refused):
    """An amount does not add up, or is not the amount due."""


class NotFound(ConquietError):
    """No row has this id yet; a retry may find it, if the command that creates it comes late."""


class Lifecycle(NamedTuple):
    """Lists the states of one kind of thing, and the transitions from each.

    >>> ORDER.check(UUID(int=7), "ready_for_dispatch", "in_transit")
    >>> LICENSE.states
    ('pending_review', 'verified', 'rejected', 'expired')
    """

    kind: str
    follows: Mapping[str, tuple[str, ...]]

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.follows)

    def check(self, id_: UUID, old: str, new: str) -> None:
        """Raise `IllegalTransition` unless `new` may follow `old`."""
        allowed = self.follows[old]
        if new not in allowed:
            after = f"only {' or '.join(allowed)}" if allowed else "nothing"
            raise IllegalTransition(
                f"{self.kind} {id_}: it is {old} and cannot become {new}; {after} follows that"
            )


ORDER = Lifecycle(
    "order",
    {
        "created_pending": (
            *("accepted", "partially_accepted", "rejected", "canceled", "expired"),
        ),
        "accepted": ("ready_for_dispatch", "canceled"),
        "partially_accepted": ("ready_for_dispatch", "canceled"),
        "ready_for_dispatch": ("in_transit", "canceled"),
        "in_transit": ("delivered",),
        "delivered": ("closed",),
        "closed": (),
        "rejected": (),
        "canceled": (),
        "expired": (),
    },
)
LINE = Lifecycle("line", {"pending": ("accepted", "rejected"), "accepted": (), "rejected": ()})
LICENSE = Lifecycle(
    "license",
    {
        "pending_review": ("verified", "rejected"),
        "verified": ("expired",),
        "rejected": ("pending_review",),
        "expired": ("pending_review",),
    },
)
AD = Lifecycle(
    "ad",
    {
        "draft": ("active",),
        "active": ("paused", "expired"),
        "paused": ("active", "expired"),
        "expired": (),
    },
)
