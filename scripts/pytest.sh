#!/usr/bin/env bash
# Runs pytest with the given arguments. What fails is run once more, alone: with two cores, tests
# that run side by side can starve each other's servers. A test that fails twice fails; one that
# passes then is named, and wants mending. What it left open is told then, and no failure: it can
# be another test's, or what Python collects at its end.
set -uo pipefail
cd "$(dirname "$0")/.."

.venv/bin/python -m pytest "$@"
status=$?
[ $status -eq 1 ] || exit $status # 1: tests failed; anything else is not for a second try

printf '\n==> once more, alone: what failed\n'
.venv/bin/python -m pytest -q -n 0 --last-failed --last-failed-no-failures none \
    -W default::pytest.PytestUnraisableExceptionWarning
again=$?
[ $again -eq 0 ] && printf '\nunsteady: the tests above failed once and passed alone\n'
exit $again
