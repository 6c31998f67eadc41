"""What may follow what; docs/marketplace.md draws it, and the tables check the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from conquiet.errors import ConquietError, PermanentError


class Refused(PermanentError):
    """A command that breaks a rule, and will break it however often it comes."""


class IllegalTransition(Refused):
    """From the state that it is in, nothing leads to the one that was asked for."""


class WrongAmount(Refused):
    """Cents that do not add up, or are not those that are due."""


class NotFound(ConquietError):
    """Nothing has this id yet; not permanent, since the command before it may be on its way."""


class Lifecycle(NamedTuple):
    """The states of one kind of thing, and what may follow each.

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
        """Raise unless the one may become the other."""
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
