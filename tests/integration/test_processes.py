"""Supervised processes: real children that die, get stuck, and are stopped in every way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import zygote
from tests.waiting import eventually

from conquiet import Worker
from conquiet.errors import ConfigError
from conquiet.processes import exclude_loaded_objects, resolve, run_processes

# What the children do is told by files: `go` lets an endless handler return, `started-PID` and
# `finished-PID` say how far a child is.
SERVICE = '''
import os, re, signal, sys, time
from pathlib import Path
from conquiet import Message, Router, Worker
from conquiet.source import EndOfSource

here = Path(__file__).parent

class Once:
    """One message for each process, then nothing."""
    def __init__(self, ends=False):
        self.left, self.ends = 1, ends
    def read(self, limit, timeout):
        if self.left:
            self.left = 0
            return [Message(b"{}", {"id": str(os.getpid()), "type": "t", "source": "/s"})]
        if self.ends:
            raise EndOfSource
        time.sleep(min(timeout, 0.02))
        return []
    def close(self):
        (here / f"closed-{os.getpid()}").touch()

def worker(handle, ends=False, **settings):
    router = Router()
    @router.raw()
    def handler(message: Message[bytes]) -> None:
        (here / f"started-{os.getpid()}").touch()
        handle()
        (here / f"finished-{os.getpid()}").touch()
    return Worker(Once(ends), router, **settings)

def idle(): return worker(lambda: None)
def ending(): return worker(lambda: None, ends=True)

def until_go():
    while not (here / "go").exists():
        time.sleep(0.01)
def waiting(): return worker(until_go)
def impatient(): return worker(until_go, stuck_after=0.5)

def backtrack():
    (here / "go").exists() or re.match("(a|aa)+$", "a" * 200 + "b")  # keeps the GIL for ever
def frozen(): return worker(backtrack, stuck_after=1.0)

def failing_at_first():
    if not (here / "mended").exists():
        (here / f"tried-{os.getpid()}").touch()
        raise OSError("the database is away")
    return idle()

def reading_stdin(): return worker(lambda: (here / "stdin").write_text(sys.stdin.read()))
def with_arguments(name): return worker(lambda: (here / "name").write_text(name))
def no_worker(): return 7
not_callable = 7
'''

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from conquiet.processes import run_processes
sys.exit(run_processes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
"""


class Place:
    """A directory with the service, and the supervisors that were started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "service.py").write_text(SERVICE)
        self.running: list[subprocess.Popen[str]] = []

    def start(self, target: str, count: int = 2, grace: float = 20.0) -> subprocess.Popen[str]:
        return self.run([sys.executable, "-c", SCRIPT, target, str(count), str(grace)])

    def run(self, command: list[str]) -> subprocess.Popen[str]:
        with (self.path / "stderr").open("w") as log:
            started = zygote.Popen(
                command, cwd=self.path, text=True, stderr=log, stdin=subprocess.DEVNULL
            )
        self.running.append(started)
        return started

    def pids(self, prefix: str) -> set[int]:
        return {int(path.name.partition("-")[2]) for path in self.path.glob(f"{prefix}-*")}

    def wait_for(self, prefix: str, count: int) -> set[int]:
        eventually(lambda: len(self.pids(prefix)) >= count, timeout=25, message=f"{count} {prefix}")
        return self.pids(prefix)

    def touch(self, name: str) -> None:
        (self.path / name).touch()

    @property
    def log(self) -> str:
        return (self.path / "stderr").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.running:
        if process.poll() is None:
            process.kill()
            process.wait()
    place.touch("go")
    gone(*place.pids("started"))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(*pids: int) -> None:
    eventually(lambda: not any(map(is_alive, pids)), timeout=25, message=f"{pids} are gone")


def ended(process: subprocess.Popen[str]) -> int:
    return process.wait(timeout=25)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_children_softly(place: Place, number: signal.Signals) -> None:
    supervisor = place.start("service:waiting", count=2)
    children = place.wait_for("started", 2)
    supervisor.send_signal(number)
    eventually(lambda: "stopping 2 processes" in place.log, timeout=30)
    assert all(map(is_alive, children))
    place.touch("go")
    assert ended(supervisor) == 0
    assert place.pids("finished") == place.pids("closed") == children
    gone(*children)


def test_a_signal_to_the_whole_group_is_not_taken_for_two(place: Place) -> None:
    """A service manager signals every process; each child hears of it from two sides."""
    supervisor = place.start("service:waiting", count=2)
    children = place.wait_for("started", 2)
    for pid in (*children, supervisor.pid):
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: "stopping 2 processes" in place.log, timeout=30)
    place.touch("go")
    assert ended(supervisor) == 0
    assert place.pids("finished") == children


def test_a_child_that_dies_is_replaced(place: Place) -> None:
    supervisor = place.start("service:idle", count=2)
    first = place.wait_for("finished", 2)
    victim = min(first)
    os.kill(victim, signal.SIGKILL)
    now = place.wait_for("finished", 3) - {victim}
    assert len(now) == 2
    assert f"process {victim} was killed by signal 9" in place.log
    supervisor.terminate()
    assert ended(supervisor) == 0
    gone(*now)


def test_children_whose_source_has_ended_are_not_replaced(place: Place) -> None:
    supervisor = place.start("service:ending", count=2)
    assert ended(supervisor) == 0
    assert len(place.pids("started")) == 2


def test_after_the_grace_time_what_is_unfinished_is_abandoned(place: Place) -> None:
    supervisor = place.start("service:waiting", count=1, grace=0.2)
    children = place.wait_for("started", 1)
    supervisor.terminate()
    assert ended(supervisor) == 1
    assert place.pids("finished") == set()
    assert place.pids("closed") == children
    gone(*children)


def test_a_second_signal_ends_the_grace_time(place: Place) -> None:
    supervisor = place.start("service:waiting", count=1, grace=3600)
    children = place.wait_for("started", 1)
    supervisor.terminate()
    eventually(lambda: "stopping 1 processes" in place.log, timeout=30)
    supervisor.terminate()
    assert ended(supervisor) == 1
    assert place.pids("closed") == children
    gone(*children)


def test_a_child_that_does_not_stop_even_then_is_killed(place: Place) -> None:
    supervisor = place.start("service:waiting", count=1, grace=0.1)
    [child] = place.wait_for("started", 1)
    os.kill(child, signal.SIGSTOP)
    supervisor.terminate()
    assert ended(supervisor) == 1
    assert f"process {child} did not stop in time: killed" in place.log
    gone(child)


def test_children_stop_softly_by_themselves_when_the_supervisor_is_killed(place: Place) -> None:
    supervisor = place.start("service:waiting", count=2)
    children = place.wait_for("started", 2)
    supervisor.kill()
    supervisor.wait()
    place.touch("go")
    gone(*children)
    assert place.pids("finished") == place.pids("closed") == children


def test_a_handler_that_never_returns_ends_its_process_which_is_replaced(place: Place) -> None:
    supervisor = place.start("service:impatient", count=1)
    place.wait_for("started", 2)
    assert "stuck for" in place.log
    assert "in until_go" in place.log
    place.touch("go")
    place.wait_for("finished", 1)
    supervisor.terminate()
    assert ended(supervisor) == 0


def test_a_handler_that_never_lets_go_of_the_interpreter_is_noticed_too(place: Place) -> None:
    supervisor = place.start("service:frozen", count=1)
    [first] = place.wait_for("started", 1)
    gone(first)
    assert "in backtrack" in place.log
    place.touch("go")
    place.wait_for("finished", 1)
    supervisor.terminate()
    assert ended(supervisor) == 0


def test_a_worker_that_cannot_be_made_yet_is_tried_again(place: Place) -> None:
    supervisor = place.start("service:failing_at_first", count=1)
    place.wait_for("tried", 2)
    place.touch("mended")
    place.wait_for("finished", 1)
    supervisor.terminate()
    assert ended(supervisor) == 0


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("service:wating", "did you mean waiting"),
        ("servce:waiting", "no module named 'servce'; did you mean service"),
        ("service:no_worker", "returned 7, not a Worker"),
        ("service:not_callable", "returned 7, not a Worker"),
    ],
)
def test_a_worker_that_can_never_be_made_ends_it_all_at_once(
    place: Place, target: str, says: str
) -> None:
    assert ended(place.start(target, count=3)) == 2
    assert place.log.count(says) == 1


def test_children_do_not_read_the_orders_of_the_supervisor_as_stdin(place: Place) -> None:
    supervisor = place.start("service:reading_stdin", count=1)
    place.wait_for("finished", 1)
    assert (place.path / "stdin").read_text() == ""
    supervisor.terminate()
    assert ended(supervisor) == 0


MAIN = """
import sys
from service import with_arguments
from conquiet.processes import run_processes

def make(name):
    return with_arguments(name)

GUARD
    sys.exit(run_processes(make, 1, arguments={"name": "Ada"}))
"""


def test_a_function_of_the_script_itself_can_make_the_workers(place: Place) -> None:
    (place.path / "script.py").write_text(MAIN.replace("GUARD", 'if __name__ == "__main__":'))
    supervisor = place.run([sys.executable, "script.py"])
    place.wait_for("finished", 1)
    assert (place.path / "name").read_text() == "Ada"
    supervisor.terminate()
    assert ended(supervisor) == 0


def test_a_script_without_guard_does_not_start_processes_without_end(place: Place) -> None:
    (place.path / "script.py").write_text(MAIN.replace("GUARD", "if True:"))
    assert ended(place.run([sys.executable, "script.py"])) == 2
    assert 'if __name__ == "__main__"' in place.log


def a_lambda() -> Callable[[], Worker]:
    return lambda: None  # type: ignore[return-value]


@pytest.mark.parametrize("target", [a_lambda(), "no_colon", ":x", "x:"])
def test_targets_that_no_child_could_import_are_refused(target: str) -> None:
    if isinstance(target, str):
        with pytest.raises(ConfigError, match="module:name"):
            resolve(target)
    else:
        with pytest.raises(ConfigError, match="cannot be imported by a child"):
            run_processes(target, 1)


@pytest.mark.parametrize(("count", "grace"), [(0, 1.0), (True, 1.0), (1, -1.0), (1, float("inf"))])
def test_numbers_that_cannot_work_are_refused(count: int, grace: float) -> None:
    with pytest.raises(ConfigError, match=r"count=|grace="):
        run_processes("service:idle", count, grace)


def test_loaded_objects_are_excluded_from_garbage_collection_while_a_worker_runs() -> None:
    with exclude_loaded_objects():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
