"""What ends a server after us, whatever we die of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# Both scripts take a process to be the one in server.pid only if it was born at the same clock tick
# (field 22 of its stat): a pid may be in use again by the time that it is needed.
_BORN = 'born() { set -- $(cat "/proc/$1/stat" 2>/dev/null); echo "${22:-} ${3:-}"; }\n'

# The server writes its own pid before it becomes the server: no moment in which it runs unknown to
# the guardian, and no start any more once the guardian has removed the directory.
_LAUNCHER = _BORN + 'echo "$$ $(born $$)" > .pid && mv .pid server.pid 2>/dev/null && exec "$@"'

# Waits until the pipe from us closes, which the kernel does whatever we die of.
_GUARDIAN = (
    _BORN
    + """trap '' HUP INT TERM
directory=$1 signal=$2
alive() {
    [ -n "$since" ] || { kill -0 "$pid" 2>/dev/null; return; }
    case "$(born "$pid")" in "$since Z") return 1 ;; "$since "*) ;; *) return 1 ;; esac
}
while read -r _; do :; done
if [ -r "$directory/server.pid" ] && read -r pid since _ < "$directory/server.pid" && alive; then
    kill -s "$signal" "$pid"
    tries=0
    while alive && [ $tries -lt 100 ]; do sleep 0.05; tries=$((tries + 1)); done
    alive && kill -s KILL "$pid"
fi
rm -rf "$directory"
"""
)


def guarded(command: list[str]) -> list[str]:
    """The command of a server, run in its directory so that its guardian knows it."""
    return ["/bin/sh", "-c", _LAUNCHER, "launcher", *command]


class Guardian:
    """A process that ends a server and removes its directory, once we are gone."""

    def __init__(self, directory: Path, signal: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, "guardian", str(directory), signal],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C at the terminal must not reach it before us
        )
        _on_duty.add(self)

    def finish(self) -> None:
        """Have it do its work now."""
        _on_duty.discard(self)
        self._let_go()
        self._process.wait()

    def _let_go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


_on_duty: set[Guardian] = set()


def _let_go_of_all() -> None:
    """A forked child must not hold the pipes open: the guardians would wait for it too."""
    while _on_duty:
        _on_duty.pop()._let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
