"""Idempotency of consumers, on a real Redis: claimed, confirmed, released by its owner."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests import zygote
from tests.waiting import eventually

from conquiet.errors import Blameless, ConfigError, StoreError
from conquiet.events import AsyncIdempotency, Idempotency, LeaseLost
from conquiet.redis import InProgress

EVENT = uuid.UUID("01900000-0000-7000-8000-000000000001")
KEY = f"pf:evt:processed:mailer:{EVENT}"


@pytest.fixture
def idempotency(redis_client) -> Idempotency:
    return Idempotency(redis_client, lease=30, ttl=3600)


def value(client) -> str:
    found = client.get(KEY)
    return "" if found is None else found.decode().partition(":")[0]


# --- the ticket's one call ------------------------------------------------------------------


def test_the_first_call_marks_and_later_ones_say_so(idempotency, redis_client) -> None:
    assert idempotency.check_and_mark_processed("mailer", EVENT, 60) is False
    assert idempotency.check_and_mark_processed("mailer", str(EVENT), 60) is True
    assert 0 < redis_client.pttl(KEY) <= 60_000


def test_consumers_do_not_know_of_each_other(idempotency) -> None:
    assert idempotency.check_and_mark_processed("mailer", EVENT) is False
    assert idempotency.check_and_mark_processed("analytics", EVENT) is False


def test_a_mark_is_forgotten_after_its_ttl(idempotency, redis_client) -> None:
    idempotency.check_and_mark_processed("mailer", EVENT, 0.01)
    eventually(lambda: not redis_client.exists(KEY))
    assert idempotency.check_and_mark_processed("mailer", EVENT) is False


def test_a_crash_after_the_mark_drops_the_event(idempotency) -> None:
    """What the one call cannot do better, and why `guard` exists."""
    idempotency.check_and_mark_processed("mailer", EVENT)  # and the process dies here
    assert idempotency.check_and_mark_processed("mailer", EVENT) is True


def test_the_one_call_does_not_overrule_a_guard(idempotency) -> None:
    with idempotency.guard("mailer", EVENT), pytest.raises(InProgress):
        idempotency.check_and_mark_processed("mailer", EVENT)


# --- guard ----------------------------------------------------------------------------------


def test_marked_only_after_success_and_then_for_long(idempotency, redis_client) -> None:
    with idempotency.guard("mailer", EVENT) as fresh:
        assert fresh
        assert value(redis_client) == "processing"
        assert 0 < redis_client.pttl(KEY) <= 30_000
    assert value(redis_client) == "done"
    assert 30_000 < redis_client.pttl(KEY) <= 3_600_000


def test_a_duplicate_does_not_run_the_side_effects_again(idempotency) -> None:
    effects = []
    for _ in range(3):
        with idempotency.guard("mailer", EVENT) as fresh:
            if fresh:
                effects.append("sent")
    assert effects == ["sent"]


def test_a_failure_releases_and_the_next_delivery_tries_again(idempotency, redis_client) -> None:
    with pytest.raises(ValueError), idempotency.guard("mailer", EVENT):
        raise ValueError("smtp")
    assert value(redis_client) == ""
    with idempotency.guard("mailer", EVENT) as fresh:
        assert fresh


def test_in_progress_elsewhere_is_not_to_be_acked(idempotency, redis_client) -> None:
    other = Idempotency(redis_client)
    with idempotency.guard("mailer", EVENT):
        with pytest.raises(InProgress, match="do not ack"), other.guard("mailer", EVENT):
            pytest.fail("it ran twice")
        assert value(redis_client) == "processing"
    assert issubclass(InProgress, Blameless)


def test_a_crash_costs_one_lease_and_not_the_event(redis_client) -> None:
    short = Idempotency(redis_client, lease=0.2)
    claim = short.claim("mailer", EVENT)
    short.keeper.remove(claim)  # as if its process were dead
    with pytest.raises(InProgress):
        short.claim("mailer", EVENT)
    eventually(lambda: not redis_client.exists(KEY))
    with short.guard("mailer", EVENT) as fresh:
        assert fresh


def test_a_long_handler_keeps_its_lease(redis_client) -> None:
    short = Idempotency(redis_client, lease=0.3, ttl=60)
    other = Idempotency(redis_client)
    held = threading.Event()
    with short.guard("mailer", EVENT):
        for _ in range(10):
            held.wait(0.1)
            with pytest.raises(InProgress):
                other.claim("mailer", EVENT)
    assert other.claim("mailer", EVENT) is None


def test_a_lost_lease_is_reported_and_its_new_holder_left_alone(idempotency, redis_client) -> None:
    late = idempotency.claim("mailer", EVENT)
    redis_client.delete(KEY)  # the lease ran out
    held = idempotency.claim("mailer", EVENT)
    late.renew()
    late.release()
    assert redis_client.get(KEY).decode() == f"processing:{held.owner}"
    with pytest.raises(LeaseLost, match="happened twice"):
        late.confirm()
    assert redis_client.get(KEY).decode() == f"processing:{held.owner}"
    held.confirm()
    assert value(redis_client) == "done"


def test_a_release_does_not_take_back_what_is_done(idempotency, redis_client) -> None:
    claim = idempotency.claim("mailer", EVENT)
    claim.confirm()
    claim.release()
    assert value(redis_client) == "done"


def test_a_renewal_does_not_bring_back_what_was_released(idempotency, redis_client) -> None:
    claim = idempotency.claim("mailer", EVENT)
    claim.release()
    claim.renew()
    assert value(redis_client) == ""


def test_a_lease_that_ran_out_and_that_nobody_took_is_still_confirmed(
    idempotency, redis_client
) -> None:
    claim = idempotency.claim("mailer", EVENT)
    redis_client.delete(KEY)
    claim.confirm()
    assert value(redis_client) == "done"


def test_a_confirm_whose_reply_was_lost_may_be_repeated(idempotency, redis_client) -> None:
    claim = idempotency.claim("mailer", EVENT)
    claim.confirm()
    claim.confirm()
    assert value(redis_client) == "done"


# --- the decorator, and asyncio -------------------------------------------------------------


def test_the_decorator_runs_a_function_once_per_event(idempotency) -> None:
    effects = []

    @idempotency.guard("mailer", lambda event: event["eventId"])
    def send(event) -> str:
        effects.append(event["eventId"])
        return "sent"

    other = str(uuid.uuid4())
    events = [{"eventId": str(EVENT)}, {"eventId": str(EVENT)}, {"eventId": other}]
    assert [send(event) for event in events] == ["sent", None, "sent"]
    assert effects == [str(EVENT), other]
    assert send.__name__ == "send"


def test_a_decorated_function_that_fails_may_be_called_again(idempotency) -> None:
    failures = iter([ValueError("once"), None])

    @idempotency.guard("mailer", EVENT)
    def send() -> str:
        failure = next(failures)
        if failure:
            raise failure
        return "sent"

    with pytest.raises(ValueError):
        send()
    assert [send(), send()] == ["sent", None]


def test_coroutines_are_guarded_too(idempotency, redis_client) -> None:
    @idempotency.guard("mailer", lambda event_id: event_id)
    async def send(event_id) -> str:
        await asyncio.sleep(0)
        return "sent"

    async def fail() -> None:
        async with idempotency.guard("analytics", EVENT) as fresh:
            assert fresh
            raise ValueError

    async def run() -> None:
        assert [await send(EVENT), await send(EVENT)] == ["sent", None]
        with pytest.raises(ValueError):
            await fail()
        async with idempotency.guard("analytics", EVENT) as fresh:
            assert fresh

    asyncio.run(run())


def test_a_block_needs_an_id(idempotency) -> None:
    with pytest.raises(ConfigError, match="is a decorator"), idempotency.guard("m", str):
        pass


# --- many at once ---------------------------------------------------------------------------


def attempt(idempotency: Idempotency, event_id: str) -> str:
    try:
        with idempotency.guard("mailer", event_id) as fresh:
            return "ran" if fresh else "seen"
    except InProgress:
        return "held"


def test_fifty_threads_run_each_event_once(redis_url: str) -> None:
    events = [str(uuid.uuid4()) for _ in range(20)]
    start = threading.Barrier(50)
    with redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(50) as pool:
        idempotency = Idempotency(client)

        def consume(_: int) -> list[str]:
            start.wait()
            return [attempt(idempotency, event_id) for event_id in events]

        outcomes = list(pool.map(consume, range(50)))
    for answers in zip(*outcomes, strict=True):
        assert answers.count("ran") == 1


def test_fifty_threads_mark_once(redis_url: str) -> None:
    start = threading.Barrier(50)
    with redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(50) as pool:
        idempotency = Idempotency(client)

        def mark(_: int) -> bool:
            start.wait()
            return idempotency.check_and_mark_processed("mailer", EVENT)

        assert list(pool.map(mark, range(50))).count(False) == 1


CONSUME = """
import sys, uuid
import redis
from conquiet.events import Idempotency
from conquiet.redis import InProgress

idempotency = Idempotency(redis.Redis.from_url(sys.argv[1]))
sys.stdin.readline()
for event_id in sys.argv[2:]:
    try:
        with idempotency.guard("mailer", event_id) as fresh:
            if fresh:
                print(event_id)
    except InProgress:
        pass
"""


def test_several_processes_run_each_event_once(redis_url: str) -> None:
    events = [str(uuid.uuid4()) for _ in range(100)]
    command = [sys.executable, "-c", CONSUME, redis_url, *events]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [zygote.Popen(command, **pipes) for _ in range(4)]
    ran = [process.communicate("go\n", timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert sorted(event_id for one in ran for event_id in one) == sorted(events)


KILLED = """
import sys, os, signal
import redis
from conquiet.events import Idempotency

with Idempotency(redis.Redis.from_url(sys.argv[1]), lease=0.5).guard("mailer", sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_event_of_a_killed_process_is_handled_by_another(redis_url, idempotency) -> None:
    done = zygote.run([sys.executable, "-c", KILLED, redis_url, str(EVENT)])
    assert done.returncode == -9
    assert eventually(lambda: attempt(idempotency, str(EVENT)) == "ran")


FORKED = """
import os, sys, time
import redis
from conquiet.events import Idempotency

client = redis.Redis.from_url(sys.argv[1])
idempotency = Idempotency(client, lease=0.4)
with idempotency.guard("mailer", sys.argv[2]):
    pass
assert idempotency.keeper._thread.is_alive()  # it stays behind: a fork has one thread
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with idempotency.guard("mailer", sys.argv[3]):
    for _ in range(12):
        time.sleep(0.1)
        if not client.exists(f"pf:evt:processed:mailer:{sys.argv[3]}"):
            os._exit(1)
os._exit(0)
"""


def test_a_process_that_was_forked_keeps_its_leases_too(redis_url: str) -> None:
    """As in Celery's prefork pool, whose parent may have handled something before it forks."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, redis_url, str(EVENT)]
    assert zygote.run([*command, str(uuid.uuid4())], timeout=60).returncode == 0


# --- trouble --------------------------------------------------------------------------------


def test_a_redis_that_is_away_is_nobodys_fault_and_nothing_runs() -> None:
    away = Idempotency(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)))
    with pytest.raises(StoreError, match="could not claim"), away.guard("mailer", EVENT):
        pytest.fail("it ran without a claim")


def test_the_script_is_loaded_again_after_a_flush(idempotency, redis_client) -> None:
    idempotency.claim("mailer", EVENT).release()
    redis_client.script_flush()
    assert idempotency.claim("mailer", EVENT) is not None


def test_clients_that_decode_are_fine(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert Idempotency(client).check_and_mark_processed("mailer", EVENT) is False


@pytest.mark.parametrize(
    ("consumer", "event_id", "why"),
    [
        ("a:b", EVENT, "consumer 'a:b'"),
        ("", EVENT, "consumer ''"),
        ("mailer", "7", "'7' is not a UUID"),
        ("mailer", None, "None is not a UUID"),
    ],
)
def test_names_that_could_be_mixed_up_are_refused(idempotency, consumer, event_id, why) -> None:
    with pytest.raises(ConfigError, match=why):
        idempotency.claim(consumer, event_id)


@pytest.mark.parametrize("settings", [{"lease": 0}, {"ttl": -1}, {"lease": 60, "ttl": 30}])
def test_settings_that_cannot_work_are_refused(redis_client, settings) -> None:
    with pytest.raises(ConfigError):
        Idempotency(redis_client, **settings)


def test_an_id_has_one_key_however_it_is_written(idempotency) -> None:
    assert idempotency.key("mailer", str(EVENT).upper()) == KEY == idempotency.key("mailer", EVENT)


def test_a_client_for_asyncio_is_refused(redis_url: str) -> None:
    """Its answers are coroutines, which equal nothing: every duplicate would count as fresh."""
    client = redis.asyncio.Redis.from_url(redis_url)
    with pytest.raises(ConfigError, match=r"not redis\.asyncio.*; AsyncIdempotency takes"):
        Idempotency(client)


def test_the_ttl_is_that_of_the_environment(redis_client, monkeypatch) -> None:
    assert Idempotency(redis_client).ttl == 168 * 3600
    monkeypatch.setenv("CONQUIET_OUTBOX_IDEMPOTENCY_TTL_HOURS", "720")
    with Idempotency(redis_client).guard("mailer", EVENT):
        pass
    assert 719 * 3600 < redis_client.ttl(KEY) <= 720 * 3600
    monkeypatch.setenv("CONQUIET_OUTBOX_IDEMPOTENCY_TTL_HOURS", "a week")
    with pytest.raises(ConfigError, match="TTL_HOURS: 'a week' is not a whole number from 1"):
        Idempotency(redis_client)


@pytest.mark.parametrize("ttl", [0, -5, "7d", True, float("inf"), timedelta(0)])
def test_a_wrong_ttl_is_refused_before_anything_happens(idempotency, redis_client, ttl) -> None:
    with pytest.raises(ConfigError, match="ttl="):
        idempotency.check_and_mark_processed("mailer", EVENT, ttl)
    with pytest.raises(ConfigError, match="ttl="):
        idempotency.guard("mailer", EVENT, ttl=ttl)
    assert value(redis_client) == ""


def test_a_ttl_may_be_a_timedelta(idempotency, redis_client) -> None:
    with idempotency.guard("mailer", EVENT, ttl=timedelta(days=7)):
        pass
    assert 6 * 86_400 < redis_client.ttl(KEY) <= 7 * 86_400


def test_a_task_that_is_cancelled_while_it_claims_holds_nothing(redis_url, redis_client) -> None:
    with redis.Redis.from_url(redis_url) as client:
        idempotency = Idempotency(client)

        async def enter() -> None:
            async with idempotency.guard("mailer", EVENT):
                raise AssertionError("it was cancelled before")

        async def cancel() -> None:
            redis_client.execute_command("CLIENT PAUSE 300 WRITE")
            task = asyncio.create_task(enter())
            await asyncio.sleep(0.1)  # the claim is on its way, and the server does not answer
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert eventually(lambda: not len(idempotency.keeper) and value(redis_client) == "")
        with idempotency.guard("mailer", EVENT) as fresh:
            assert fresh


def test_a_task_that_is_cancelled_while_it_settles_settles_all_the_same(
    redis_url, redis_client
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        idempotency = Idempotency(client)

        async def handle(done: asyncio.Event) -> None:
            async with idempotency.guard("mailer", EVENT):
                redis_client.execute_command("CLIENT PAUSE 300 WRITE")
                done.set()

        async def cancel() -> None:
            done = asyncio.Event()
            task = asyncio.create_task(handle(done))
            await done.wait()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert eventually(lambda: value(redis_client) == "done")


def test_a_task_that_is_cancelled_before_a_thread_is_free_to_settle_settles_all_the_same(
    idempotency, redis_client
) -> None:
    blocked = threading.Event()

    async def handle(done: asyncio.Event) -> None:
        async with idempotency.guard("mailer", EVENT):
            asyncio.get_running_loop().run_in_executor(None, blocked.wait, 30)
            done.set()

    async def cancel() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        done = asyncio.Event()
        task = asyncio.create_task(handle(done))
        await done.wait()
        await asyncio.sleep(0)  # it settles next, and waits for the only thread
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        blocked.set()
        while value(redis_client) != "done":
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancel(), 20))


# --- a client of redis.asyncio --------------------------------------------------------------


def on_loop(redis_url, test, **settings) -> None:
    """Run a test with an AsyncIdempotency."""

    async def run() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await asyncio.wait_for(test(AsyncIdempotency(client, **settings)), 20)

    asyncio.run(run())


def test_on_a_loop_an_event_is_marked_after_success_and_runs_once(redis_url, redis_client) -> None:
    async def test(idempotency) -> None:
        async with idempotency.guard("mailer", EVENT) as fresh:
            assert fresh
            assert value(redis_client) == "processing"
            assert 0 < redis_client.pttl(KEY) <= 30_000
            with pytest.raises(InProgress, match="do not ack"):
                await idempotency.claim("mailer", EVENT)
            with pytest.raises(InProgress, match="do not ack"):
                await idempotency.check_and_mark_processed("mailer", EVENT)
        assert value(redis_client) == "done"
        async with idempotency.guard("mailer", EVENT) as fresh:
            assert not fresh
        assert await idempotency.check_and_mark_processed("mailer", EVENT) is True
        assert await idempotency.check_and_mark_processed("analytics", EVENT, 60) is False
        assert not len(idempotency.keeper)

    on_loop(redis_url, test)
    with Idempotency(redis_client).guard("mailer", EVENT) as fresh:
        assert not fresh  # one key, one script: a sync consumer of the same name has seen it


def test_on_a_loop_a_failure_releases_and_the_decorator_tries_again(redis_url) -> None:
    async def test(idempotency) -> None:
        failures = iter([ValueError("once"), None])

        @idempotency.guard("mailer", lambda event: event["eventId"])
        async def send(event) -> str:
            if failure := next(failures):
                raise failure
            return "sent"

        with pytest.raises(ValueError, match="once"):
            await send({"eventId": EVENT})
        assert [await send({"eventId": EVENT}) for _ in range(2)] == ["sent", None]
        with pytest.raises(ConfigError, match="is not a coroutine function"):
            idempotency.guard("mailer", EVENT)(print)
        with pytest.raises(ConfigError, match="is a decorator"):
            await idempotency.guard("mailer", str).__aenter__()

    on_loop(redis_url, test)


def test_on_a_loop_a_long_handler_keeps_its_lease(redis_url, redis_client) -> None:
    other = Idempotency(redis_client)

    async def test(idempotency) -> None:
        async with idempotency.guard("mailer", EVENT):
            for _ in range(8):
                await asyncio.sleep(0.05)
                with pytest.raises(InProgress):
                    other.claim("mailer", EVENT)
        assert other.claim("mailer", EVENT) is None

    on_loop(redis_url, test, lease=0.2, ttl=60)


def test_on_a_loop_a_lost_lease_is_reported_and_its_holder_left_alone(
    redis_url, redis_client
) -> None:
    async def test(idempotency) -> None:
        late = await idempotency.claim("mailer", EVENT)
        redis_client.delete(KEY)  # the lease ran out
        held = await idempotency.claim("mailer", EVENT)
        assert await late.renew() is None
        await late.release()
        with pytest.raises(LeaseLost, match="happened twice"):
            await late.confirm()
        assert redis_client.get(KEY).decode() == f"processing:{held.owner}"
        await held.confirm()

    on_loop(redis_url, test)
    assert value(redis_client) == "done"


def test_on_a_loop_a_hundred_tasks_run_each_event_once(redis_url) -> None:
    async def test(idempotency) -> None:
        ran = []

        async def attempt(event_id) -> None:
            try:
                async with idempotency.guard("mailer", event_id) as fresh:
                    await asyncio.sleep(0)
                    ran.extend([event_id] if fresh else [])
            except InProgress:
                pass

        ids = [uuid.uuid4() for _ in range(25)]
        await asyncio.gather(*(attempt(event_id) for event_id in ids * 4))
        assert sorted(ran) == sorted(ids)

    on_loop(redis_url, test)


def test_on_a_loop_a_task_cancelled_at_any_await_leaves_no_claim(redis_url, redis_client) -> None:
    """Cancelled in the claim or in the handler it holds nothing; later, the event is done."""
    ends = []

    async def cancel(idempotency, event_id, turns) -> None:
        """Cancel a handler after so many turns of the loop."""
        entered = []

        async def handle() -> None:
            async with idempotency.guard("mailer", event_id):
                entered.append(1)
                await asyncio.sleep(0)
                entered.append(2)

        task = asyncio.create_task(handle())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        while idempotency._settling:
            await asyncio.sleep(0.001)
        key = idempotency.key("mailer", event_id)
        found = (redis_client.get(key) or b"").decode().partition(":")[0]
        assert found == ("done" if entered == [1, 2] else ""), turns
        assert not len(idempotency.keeper)
        ends.append((task.cancelled(), found))

    async def test(idempotency) -> None:
        for turns in range(60):
            await cancel(idempotency, uuid.uuid4(), turns)

    on_loop(redis_url, test)
    # Cancelled before it was done, and while it settled.
    assert {(True, ""), (True, "done")} <= set(ends)


def test_on_a_loop_a_redis_that_is_away_is_a_store_error_and_nothing_runs() -> None:
    async def run() -> None:
        async with redis.asyncio.Redis(port=1, retry=AsyncRetry(NoBackoff(), 0)) as client:
            with pytest.raises(StoreError, match="could not claim"):
                await AsyncIdempotency(client).guard("mailer", EVENT).__aenter__()

    asyncio.run(run())


def test_on_a_loop_a_sync_client_is_refused(redis_client) -> None:
    with pytest.raises(ConfigError, match=r"takes a redis\.asyncio\.Redis, not redis\.client"):
        AsyncIdempotency(redis_client)
