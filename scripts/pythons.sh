#!/usr/bin/env bash
# The core, SQL and Redis tests on the other versions of Python that this machine has, each in an environment of its
# own, .venv-python-VERSION; then, on the newest of them, those that use an event loop once more, on uvloop. A version
# that is not on the machine is listed, and fails nothing. Python 3.12 has the oldest SQLAlchemy that pyproject.toml allows.
set -uo pipefail
cd "$(dirname "$0")/.."

unset CONQUIET_BROKER_URL CONQUIET_DATABASE_URL # those would be tested instead
versions=${VERSIONS:-3.11 3.12 3.13 3.14}
packages=(-e '.[metrics,redis,sql,postgres,embedded]' aiosqlite asyncpg cloudevents greenlet hypothesis jsonschema
    opentelemetry-sdk pydantic pytest pytest-timeout pytest-xdist uvloop)
declare -A oldest=([3.12]=$(sed -n 's/^sql = \["sqlalchemy>=\([0-9.]*\)".*/sqlalchemy==\1/p' pyproject.toml))
tests=(tests/unit/test_{acking,codec,handler,intake,lease,message,routes}.py tests/unit/test_{router,worker}*.py
    tests/unit/{memory,middleware,queue} tests/conformance tests/integration/{sql,redis,queue}
    tests/integration/events/test_idempotency.py)
own=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
newest=
missing=()
failed=()

find_python() { # find_python VERSION
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

wanted() { { cat pyproject.toml constraints.txt; echo "${packages[@]}" "${oldest[@]}"; pwd; } | cksum; }

prepare() { # prepare VERSION PYTHON
    local home=.venv-python-$1
    [ "$(cat "$home/.set-up-for" 2>/dev/null)" = "$(wanted)" ] && return
    printf '==> installing %s\n' "$home"
    "$2" -m venv --clear "$home" &&
        "$home/bin/python" -m pip install --quiet --disable-pip-version-check --prefer-binary --no-compile \
            -c constraints.txt "${packages[@]}" &&
        { [ -z "${oldest[$1]:-}" ] || "$home/bin/python" -m pip install --quiet --disable-pip-version-check \
            --no-compile --no-deps "${oldest[$1]}"; } &&
        wanted >"$home/.set-up-for"
}

run_on() { # run_on VERSION NAME TEST…
    local version=$1 name=$2
    shift 2
    printf '\n==> tests on %s\n' "$name"
    TEST_PYTHON=.venv-python-$version/bin/python scripts/pytest.sh -q -n "${WORKERS:-2}" --dist loadgroup \
        -m "not slow" "$@" || failed+=("$name")
}

for version in $versions; do
    [ "$version" = "$own" ] && continue # make test has it
    if ! python=$(find_python "$version"); then
        missing+=("Python $version")
        continue
    fi
    if ! prepare "$version" "$python"; then
        failed+=("Python $version: its packages cannot be installed")
        continue
    fi
    run_on "$version" "Python $version" "${tests[@]}"
    newest=$version
done
if [ -n "$newest" ]; then
    mapfile -t on_loop < <(grep -rl --include='test_*.py' -e asyncio -e on_loop "${tests[@]}")
    CONQUIET_TEST_LOOP=uvloop run_on "$newest" "Python $newest with uvloop" "${on_loop[@]}"
fi

[ ${#missing[@]} -gt 0 ] && printf '\nnot tested, since this machine has no interpreter of: %s\n' "$(IFS=,; echo "${missing[*]}")"
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nfailed on:\n'
    printf '  %s\n' "${failed[@]}"
    exit 1
fi
