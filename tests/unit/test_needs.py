"""What a machine lacks is said in one line, with the command that installs it."""

from __future__ import annotations

from tests.needs import left_out


def test_nothing_is_said_when_nothing_was_left_out() -> None:
    assert left_out([]) == ""
    assert left_out(["another suite has it"]) == ""


def test_one_line_counts_the_tests_and_names_one_command() -> None:
    line = left_out(
        [
            "needs RabbitMQ: apt-get install rabbitmq-server",
            "needs RabbitMQ: apt-get install rabbitmq-server",
            "needs PgBouncer: no pgbouncer on the PATH",
        ]
    )
    assert line == (
        "left out: 2 tests of RabbitMQ, 1 of PgBouncer; to run them: "
        "sudo apt-get install --no-install-recommends pgbouncer rabbitmq-server"
    )


def test_a_want_that_no_package_fulfils_is_named_all_the_same() -> None:
    assert left_out(["needs a checkout that every user may read"]) == (
        "left out: 1 test of a checkout that every user may read"
    )
