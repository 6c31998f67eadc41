#!/usr/bin/env bash
# Runs pytest with the given arguments. Failed tests run once more, alone: with two cores, tests
# that run side by side can starve each other's servers. A test that fails twice fails; one that
# passes then is listed as unsteady, to be fixed. In the second run an unraisable exception is only
# a warning: it can belong to another test, or to Python's own shutdown.
set -uo pipefail
cd "$(dirname "$0")/.."

# Temporary files in memory, where there is room and programs may run: tests make and drop thousands
# of PostgreSQL databases of 300 files each, which a file system such as ext4 makes slower and slower.
memory=$(mktemp -d /dev/shm/conquiet-tests-XXXXXX 2>/dev/null)
if [ -n "$memory" ]; then
    trap 'rm -rf "$memory"' EXIT
    printf '#!/bin/sh\n' >"$memory/program"
    chmod 755 "$memory" "$memory/program"
    free_kilobytes=$(df --output=avail -k "$memory" | tail -n 1)
    if [ "$free_kilobytes" -gt 4000000 ] && "$memory/program" 2>/dev/null; then
        export TMPDIR=$memory
    fi
fi

python=${TEST_PYTHON:-.venv/bin/python}
"$python" -m pytest "$@"
status=$?
[ $status -eq 1 ] || exit $status # 1: tests failed; anything else is not for a second try

paths=()
for argument in "$@"; do
    # Whole files, since a test that is named and has passed would not be found; and no more than
    # what was asked for, since other files may lack their packages.
    [ -e "${argument%%::*}" ] && paths+=("${argument%%::*}")
done
printf '\n==> failed tests, once more and alone\n'
env -u LEFT_OUT "$python" -m pytest -q -n 0 --last-failed --last-failed-no-failures none \
    -W default::pytest.PytestUnraisableExceptionWarning ${paths[@]+"${paths[@]}"}
again=$?
[ $again -eq 0 ] && printf '\nunsteady: the tests above failed once and passed alone\n'
exit $again
