"""A child process of the demo that fails: the error names the cause, by logs of real failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from marketplace.demo.process import Child, ChildFailed, find_cause

LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        # The traceback at its end is a refused connection to the JVM that has died.
        ("code_cache", "java.lang.VirtualMachineError: Out of space in CodeCache for adapters"),
        ("heap", "java.lang.OutOfMemoryError: Java heap space"),
        ("no_jvm", "Could not reserve enough space for 943718400000KB object heap"),
        ("python_task", "ValueError: amount -5 of order 17 is negative"),
    ],
)
def test_the_first_error_of_a_log_is_its_cause(log: str, cause: str) -> None:
    assert find_cause((LOGS / f"{log}.log").read_text()) == cause


def test_an_error_of_spark_that_python_raises_is_found_in_its_traceback() -> None:
    cause = find_cause((LOGS / "missing_table.log").read_text())
    assert "[TABLE_OR_VIEW_NOT_FOUND]" in cause
    assert "nowhere" in cause


def test_a_worker_that_the_demo_killed_is_no_cause() -> None:
    killed = (LOGS / "workers.log").read_text()
    failed = killed + "2026-11-16 11:29:31,001 ERROR market_orders does not exist\n"
    assert "was killed by signal 9" in killed
    assert find_cause(failed) == "market_orders does not exist"


def test_a_log_without_an_error_gives_its_last_line() -> None:
    assert find_cause("starting\nbye\n\n") == "bye"
    assert find_cause("") == ""


def test_a_long_line_is_cut() -> None:
    assert len(find_cause("x" * 5_000)) == 300


def test_a_child_that_fails_is_reported_with_its_cause_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    child = Child("no_such_module_of_the_demo", {}, log)
    with pytest.raises(ChildFailed) as caught:
        child.hear(30.0)
    child.kill()
    assert str(log) in str(caught.value)
    assert "No module named no_such_module_of_the_demo" in str(caught.value)
    assert "\n" not in str(caught.value)
