"""`conquiet worker run`, as a user runs it: real processes, pipes, files and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import zygote
from tests.waiting import eventually

CONQUIET = [sys.executable, "-m", "conquiet"]

APP = """
import os, time
from pathlib import Path
import msgspec
from conquiet import Message, Router, Worker
from conquiet.memory import Log
from conquiet.shutdown import STOPPING

here = Path(__file__).parent

class Greet(msgspec.Struct):
    name: str

class Greeted(msgspec.Struct):
    name: str

router = Router()

@router.command(source="/hall")
def greet(order: Greet) -> Greeted:
    if order.name == "nobody":
        raise ValueError("nobody is here")
    if order.name in ("patient", "endless"):
        (here / "begun").touch()
        STOPPING.get().wait(60)
        (here / "stopping").touch()
    if order.name in ("endless", "frozen"):
        time.sleep(3600)
    return Greeted(order.name)

def make_router():
    return router

def make_worker():
    log = Log()
    router = Router()
    @router.raw()
    def handle(message: Message[bytes]) -> None:
        (here / f"handled-{os.getpid()}").touch()
    log.append([Message(b"{}", {"id": "1", "type": "t", "source": "/s"})])
    return Worker(log.source("group"), router)

worker = make_worker()
number = 7
"""


def line(number: int, name: str = "Ada", **attributes: Any) -> str:
    event = {"specversion": "1.0", "id": str(number), "type": "greet", "source": "/test"}
    return json.dumps({**event, "data": {"name": name}, **attributes}) + "\n"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def started(app: Path) -> Iterator[Any]:
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [*CONQUIET, "worker", "run", *arguments]
        buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
        pipes = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
        running.append(zygote.Popen(command, cwd=app, env=buffered, **pipes))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def run(app: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [*CONQUIET, "worker", "run", *arguments]
    return zygote.run(command, cwd=app, input=given, capture_output=True, text=True, timeout=60)


def names(output: str) -> list[str]:
    return [json.loads(text)["data"]["name"] for text in output.splitlines()]


@pytest.mark.parametrize("target", ["app:router", "app:make_router"])
def test_lines_come_in_at_stdin_and_events_go_out_at_stdout(app: Path, target: str) -> None:
    done = run(app, target, given=line(1, "Ada") + line(2, "Bob"))
    assert done.returncode == 0
    assert names(done.stdout) == ["Ada", "Bob"]
    [event, _] = map(json.loads, done.stdout.splitlines())
    assert (event["type"], event["source"]) == ("greeted", "/hall")
    assert done.stderr.startswith("handled 2, failed 0, in ")


def test_files_are_read_and_appended_to(app: Path) -> None:
    (app / "in.jsonl").write_text(line(1))
    arguments = ["app:router", "--source", "file:in.jsonl", "--sink", "file:out.jsonl"]
    assert [run(app, *arguments).returncode for _ in range(2)] == [0, 0]
    assert names((app / "out.jsonl").read_text()) == ["Ada", "Ada"]


def test_what_fails_goes_to_the_dead_letters_and_the_rest_flows_on(app: Path) -> None:
    given = line(1) + "nonsense\n" + line(2, "nobody") + line(3, type="unknown") + line(4, "Bob")
    done = run(app, "app:router", "--dead-letters", "dead.jsonl", given=given)
    assert done.returncode == 1
    assert names(done.stdout) == ["Ada", "Bob"]
    assert done.stderr.splitlines()[-1].startswith("handled 2, failed 3, in ")
    assert "Traceback" not in done.stderr
    letters = [json.loads(text) for text in (app / "dead.jsonl").read_text().splitlines()]
    assert {letter["deadreason"].partition(":")[0] for letter in letters} == {
        "InvalidMessage",
        "ValueError",
        "NoHandler",
    }
    assert "line 2" in done.stderr
    assert "nobody is here" in done.stderr


def test_dead_letters_can_be_fed_in_again_when_the_cause_is_gone(app: Path) -> None:
    run(app, "app:router", "--dead-letters", "dead.jsonl", given=line(1, "nobody"))
    text = (app / "app.py").read_text().replace('"nobody"', '"nobody else"')
    (app / "app.py").write_text(text)
    done = run(app, "app:router", "--source", "file:dead.jsonl")
    assert done.returncode == 0
    assert names(done.stdout) == ["nobody"]


def test_without_a_file_the_dead_letters_are_on_stderr(app: Path) -> None:
    done = run(app, "app:router", "--max-attempts", "1", given=line(2, "nobody"))
    assert done.returncode == 1
    [letter] = [json.loads(text) for text in done.stderr.splitlines() if text.startswith("{")]
    assert (letter["id"], letter["deadattempts"]) == ("2", "1")


def test_a_file_for_dead_letters_that_stays_empty_is_not_left_behind(app: Path) -> None:
    assert run(app, "app:router", "--dead-letters", "dead.jsonl", given=line(1)).returncode == 0
    assert not (app / "dead.jsonl").exists()


def test_the_summary_can_be_read_by_a_script(app: Path) -> None:
    done = run(app, "app:router", "--json", "--threads", "2", "--batch-size", "3", given=line(1))
    summary = json.loads(done.stderr.splitlines()[-1])
    assert summary.pop("seconds") >= 0
    expected = {"ok": True, "handled": 1, "failed": 0, "unhandled": 0, "finished": True}
    assert summary == expected


def test_a_line_beyond_the_limit_fails_alone(app: Path) -> None:
    given = line(1, "x" * 5_000) + line(2, "Bob")
    done = run(app, "app:router", "--max-line-bytes", "1000", given=given)
    assert (done.returncode, names(done.stdout)) == (1, ["Bob"])


def test_ordered_threads_keep_the_order_of_each_key(app: Path) -> None:
    given = "".join(line(n, f"{n}", subject=f"key-{n % 3}") for n in range(300))
    done = run(app, "app:router", "--ordered", "--threads", "3", "--batch-size", "7", given=given)
    assert done.returncode == 0
    for key in range(3):
        of_key = [int(name) for name in names(done.stdout) if int(name) % 3 == key]
        assert of_key == list(range(key, 300, 3))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_handler_finish_and_puts_aside_what_was_read(
    app: Path, started: Any, number: signal.Signals
) -> None:
    process = started("app:router", "--batch-size", "1", "--dead-letters", "dead.jsonl")
    process.stdin.write(line(1, "patient") + line(2) + line(3))
    process.stdin.flush()
    eventually((app / "begun").exists, timeout=30)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert names(output) == ["patient"]
    letters = [json.loads(text) for text in (app / "dead.jsonl").read_text().splitlines()]
    assert [letter["id"] for letter in letters] == ["2", "3"]
    assert "handled 1, failed 0, put aside unhandled 2" in errors


def test_a_second_signal_does_not_wait_for_the_handler(app: Path, started: Any) -> None:
    process = started("app:router", "--grace-seconds", "3600", "--dead-letters", "dead.jsonl")
    process.stdin.write(line(1, "endless"))
    process.stdin.flush()
    eventually((app / "begun").exists, timeout=30)
    process.terminate()
    eventually((app / "stopping").exists, timeout=30)
    process.terminate()
    assert process.wait(timeout=30) == 1
    assert json.loads((app / "dead.jsonl").read_text())["id"] == "1"


def test_a_handler_that_never_returns_ends_the_run_when_asked(app: Path) -> None:
    given = line(1) + line(2, "frozen") + line(3)
    arguments = [
        "--stuck-after-seconds",
        "0.3",
        "--batch-size",
        "1",
        "--dead-letters",
        "dead.jsonl",
    ]
    done = run(app, "app:router", *arguments, given=given)
    assert done.returncode == 1
    assert names(done.stdout) == ["Ada"]
    letters = [json.loads(text) for text in (app / "dead.jsonl").read_text().splitlines()]
    assert [letter["id"] for letter in letters] == ["2", "3"]
    assert "stuck for" in done.stderr


def test_a_reader_that_goes_away_stops_the_worker(app: Path, started: Any) -> None:
    process = started("app:router", "--dead-letters", "dead.jsonl")
    process.stdin.write(line(1))
    process.stdin.flush()
    assert names(process.stdout.readline()) == ["Ada"]
    process.stdout.close()
    process.stdin.write(line(2, "Bob"))
    process.stdin.flush()
    assert process.wait(timeout=30) == 1
    assert json.loads((app / "dead.jsonl").read_text())["id"] == "2"
    said = process.stderr.read()
    assert "Traceback" not in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize("target", ["app:worker", "app:make_worker"])
def test_a_worker_brings_its_own_source(app: Path, started: Any, target: str) -> None:
    process = started(target, "--grace-seconds", "10")
    [path] = eventually(lambda: list(app.glob("handled-*")), timeout=30)
    assert path.name == f"handled-{process.pid}"
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors.startswith("handled 1, failed 0")


def test_several_processes_run_a_worker_each(app: Path, started: Any) -> None:
    process = started("app:make_worker", "--processes", "2", "--stuck-after-seconds", "60")
    eventually(lambda: len(list(app.glob("handled-*"))) == 2, timeout=30)
    assert not (app / f"handled-{process.pid}").exists()
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0


ASYNC_APP = """
import asyncio, os
from pathlib import Path
import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from conquiet import Message, Router, Worker
from conquiet.memory import Log
from conquiet.sql import Transaction, async_connection

here = Path(__file__).parent
engine = create_async_engine("sqlite+aiosqlite://")
together = asyncio.Barrier(3)
router, on_engine = Router(), Router()
on_engine.use(Transaction(engine))

class Greet(msgspec.Struct):
    name: str

@router.command(source="/hall")
async def greet(order: Greet) -> None:
    await together.wait()

@on_engine.command(source="/hall")
async def ask(order: Greet) -> None:
    async with async_connection(engine) as connection:
        await connection.execute(text("SELECT 1"))

def make_deaf():
    log, router = Log(), Router()
    log.append([Message(b"{}", {"id": "1", "type": "t", "source": "/s"})])
    router.use(Transaction(engine))
    @router.raw()
    async def ignore_cancellations(message: Message[bytes]) -> None:
        (here / "begun").touch()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    return Worker(log.source("group"), router, concurrency=1)

def make_worker():
    log, router = Log(), Router()
    log.append([Message(b"{}", {"id": i, "type": "t", "source": "/s"}) for i in "123"])
    @router.raw()
    async def handle(message: Message[bytes]) -> None:
        await together.wait()
        (here / f"handled-{os.getpid()}").touch()
    return Worker(log.source("group"), router, concurrency=3)
"""


@pytest.mark.parametrize("arguments", [["loop:router", "--concurrency", "3"], ["loop:on_engine"]])
def test_an_async_router_runs_on_an_event_loop(app: Path, arguments: list[str]) -> None:
    (app / "loop.py").write_text(ASYNC_APP)
    done = run(app, *arguments, given="".join(map(line, range(3))))
    assert done.stderr.startswith("handled 3, failed 0"), done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_an_async_handler_that_ignores_its_cancellation_does_not_keep_the_process(
    app: Path, started: Any
) -> None:
    (app / "loop.py").write_text(ASYNC_APP)
    process = started("loop:make_deaf", "--grace-seconds", "0.1")
    eventually((app / "begun").exists, timeout=30)
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "still not finished after 5 s: t id=1" in errors


def test_several_processes_run_an_async_worker_each(app: Path, started: Any) -> None:
    (app / "loop.py").write_text(ASYNC_APP)
    process = started("loop:make_worker", "--processes", "2")
    eventually(lambda: len(list(app.glob("handled-*"))) == 2, timeout=30)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["app:rooter"], "app has no 'rooter'; did you mean router"),
        (["app:zzz"], "app has no 'zzz'; there are: Greet, Greeted, Log"),
        (["app:Greet"], "cannot be called without arguments"),
        (["apq:router"], "no module named 'apq'; did you mean app"),
        (["app.sub:router"], "no module named 'app.sub'"),
        (["app"], "write module:name"),
        (["app:number"], "must be a Router, a Worker, or a function"),
        (["broken:router"], "importing broken failed: SyntaxError"),
        (["needy:router"], "needy imports 'not_there', which is not installed"),
        (["app:router", "--source", "redis://x"], "say which stream, as in ?stream="),
        (["app:router", "--source", "file:no.jsonl"], "No such file"),
        (["app:router", "--dead-letters", "no/dead.jsonl"], "--dead-letters no/dead.jsonl"),
        (["app:router", "--processes", "2"], "stdin is read by one process; use --threads"),
        (["app:worker", "--threads", "2"], "--threads is for routers; app:worker is a worker"),
        (["app:worker", "--dead-letters", "x"], "--dead-letters is for routers"),
        (["app:router", "--threads", "2", "--concurrency", "2"], "--threads: this worker runs on"),
        (["wrong:router"], "Use this order: router.use(Transaction, Inbox"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(app: Path, arguments: list[str], says: str) -> None:
    (app / "broken.py").write_text("router = = 1")
    (app / "needy.py").write_text("import not_there")
    (app / "wrong.py").write_text(
        "from conquiet import Router\nfrom conquiet.memory import *\nstore = Store()\n"
        "router = Router()\nrouter.use(Inbox('x'), Transaction(store))\n"
    )
    done = run(app, *arguments)
    assert done.returncode == 2
    [text] = done.stderr.splitlines()
    assert says in text


def test_debug_shows_where_a_handler_failed(app: Path) -> None:
    done = run(app, "app:router", "--debug", given=line(1, "nobody"))
    assert "Traceback (most recent call last)" in done.stderr
    assert "nobody is here" in done.stderr


def test_a_thousand_lines_through_a_pipe_are_each_handled_once(app: Path) -> None:
    given = "".join(line(n, str(n)) for n in range(1_000))
    done = run(app, "app:router", "--threads", "4", "--batch-wait-seconds", "0.01", given=given)
    assert done.returncode == 0
    assert sorted(map(int, names(done.stdout))) == list(range(1_000))


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_loses_nothing(app: Path) -> None:
    """Nothing can be written to the dead letters: they are in the log."""
    done = run(app, "app:router", "--dead-letters", "/dev/full", given="nonsense\n" + line(2))
    assert done.returncode == 1
    assert names(done.stdout) == ["Ada"]
    assert "line 1 of stdin: was lost: b'nonsense'" in done.stderr


# --- health ---------------------------------------------------------------------------------


def ask(where: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(where + path, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def find_health(process: subprocess.Popen[str]) -> str:
    for text in process.stderr:
        if found := re.search(r"health is at (http://[^\s\"]+)", text):
            return found[1]
    raise AssertionError("no health server")


@pytest.mark.parametrize("arguments", [[], ["--processes", "2"]])
def test_probes_and_metrics_are_answered(app: Path, started: Any, arguments: list[str]) -> None:
    options = ["--health", "127.0.0.1:0", "--log-format", "json", "--log-level", "info"]
    process = started("app:make_worker", *options, *arguments)
    where = find_health(process)
    eventually(lambda: ask(where, "/readyz")[0] == 200, timeout=30)
    count = 2 if arguments else 1
    eventually(lambda: len(list(app.glob("handled-*"))) == count, timeout=30)
    assert ask(where, "/healthz")[0] == 200

    def reads() -> bool:
        text = ask(where, "/metrics")[1]
        found = re.search(
            r'conquiet_messages_total\{handler="handle",outcome="ok",type="\(any\)"\} (\S+)', text
        )
        return found is not None and float(found[1]) == count

    eventually(reads, timeout=30)
    text = ask(where, "/metrics")[1]
    for name in ("handler_seconds_bucket", "messages_in_flight", "source_dead_letters_total"):
        assert f"conquiet_{name}" in text
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_worker_that_cannot_read_is_not_ready_and_need_not_be_replaced(
    app: Path, started: Any
) -> None:
    (app / "away.py").write_text(
        "from app import router\n"
        "from conquiet import Worker\n"
        "class Away:\n"
        "    def read(self, limit, timeout): raise OSError('the queue is away')\n"
        "    def stop(self): pass\n"
        "    def close(self): pass\n"
        "def make():\n"
        "    from conquiet.memory import Log\n"
        "    return Worker(Away(), router, Log().sink('x'))\n"
    )
    process = started("away:make", "--health", "127.0.0.1:0", "--log-level", "info")
    where = find_health(process)
    status, _ = eventually(
        lambda: found if (found := ask(where, "/readyz"))[0] == 503 else None, timeout=30
    )
    assert status == 503
    eventually(lambda: "the queue is away" in ask(where, "/readyz")[1], timeout=30)
    assert ask(where, "/healthz")[0] == 200
    eventually(
        lambda: (
            float(
                re.search(
                    r"^conquiet_source_failed_reads (\d\S*)", ask(where, "/metrics")[1], re.M
                )[1]
            )
            >= 1
        ),
        timeout=30,
    )


def test_settings_come_from_flags_the_environment_and_a_file(app: Path) -> None:
    (app / "worker.toml").write_text('[worker]\nthreads = 3\nlog_level = "error"\n')
    command = [*CONQUIET, "worker", "run", "app:router", "--print-settings", "--json"]
    environ = {
        **os.environ,
        "CONQUIET_CONFIG": "worker.toml",
        "CONQUIET_WORKER_LOG_LEVEL": "",
        "CONQUIET_WORKER_BATCH_SIZE": "7",
        "CONQUIET_WORKER_SOURCE": "redis://:secret@host/0?stream=a&group=b",
    }
    done = zygote.run(
        [*command, "--concurrency", "9"], cwd=app, env=environ, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert (found["threads"], found["batch_size"], found["concurrency"]) == ("3", "7", "9")
    assert found["log_level"] == "error"
    assert "secret" not in done.stdout
    (app / "worker.toml").write_text("[worker]\nthreds = 3\n")
    done = zygote.run(command, cwd=app, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "[worker] has no setting 'threds'" in done.stderr
