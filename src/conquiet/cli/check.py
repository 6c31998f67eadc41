"""A check of `conquiet doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "notice", "broken"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. Absent is no fault until somebody asks for it.

    A notice is something to look at, and no fault either.
    """

    section: str
    name: str
    status: Status
    detail: str
    fix: str = ""
