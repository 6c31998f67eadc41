"""Processes: a worker in each of N child processes, supervised, and stopped together.

    supervisor ──stdin──▶ child    its settings, then orders; the end of it: the supervisor died
    supervisor ◀──ready── child    a line when its worker starts, then one per second: why it is
                                   not ready, or nothing

    starting ──ready──▶ running ──stop──▶ stopping ──▶ exit 0 (all finished) or 1
        │                  └ died or stuck ──backoff──▶ replaced
        └ exit 2 before any child was ready: cannot work, give up

Children are stopped through their stdin and not by signals, because some service managers
signal every process of a group: a child would count that and ours as two, and hurry.
"""

from __future__ import annotations

from conquiet.processes.child import exclude_loaded_objects, resolve
from conquiet.processes.supervisor import Presence, run_processes

__all__ = ["Presence", "exclude_loaded_objects", "resolve", "run_processes"]
