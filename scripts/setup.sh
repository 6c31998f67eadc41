#!/usr/bin/env bash
# Installs .venv and Java as pyproject.toml and constraints.txt ask for. Quick when nothing has
# changed, and harmless to repeat: make runs it before every target that needs it.
#   setup.sh demo    what make run needs: half of the packages
#   setup.sh [dev]   all: tests, docs, types, other brokers
set -euo pipefail
cd "$(dirname "$0")/.."

level=${1:-dev}
stamp=.venv/.set-up-for # of dev, which contains demo

demo_imports='
import deltalake, duckdb, pyarrow.dataset, pyspark.sql, pyspark.worker
import conquiet.cli.demo, conquiet.spark.formats, conquiet.spark.settings
import marketplace.demo.pipeline, marketplace.demo.relays, marketplace.demo.run
import marketplace.demo.workers, marketplace.lake, marketplace.service'

say() { printf '==> %s\n' "$*"; }
case $level in demo | dev) ;; *) echo "setup: $level: write demo or dev" >&2 && exit 2 ;; esac
give_up() { printf 'setup: %s\n' "$*" >&2; exit 1; }
as_root_with_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

wanted() { { cat pyproject.toml examples/marketplace/pyproject.toml constraints.txt; pwd; } | cksum; }
stamped() { [ "$(cat "$1" 2>/dev/null)" = "$(wanted)" ]; }
up_to_date() { [ -x .venv/bin/python ] && { stamped "$stamp" || { [ "$level" = demo ] && stamped "$stamp-demo"; }; }; }

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if recent_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    give_up "no Python 3.11 or newer found. Install one (Debian 12 and later: apt-get install python3)," \
        "or name it: make setup PYTHON=/path/to/python"
}

make_venv() {
    local python package
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
        as_root_with_apt || give_up "$python cannot make virtual environments: sudo apt-get install $package"
        say "installing $package, which $python needs to make a virtual environment"
        apt_install "$package"
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
}

# The requirements of a dependency group; pip itself reads them from version 25.1 on, and Python often brings an older one.
group() {
    .venv/bin/python - "$1" <<'PYTHON'
import sys, tomllib

with open("pyproject.toml", "rb") as file:
    groups = tomllib.load(file)["dependency-groups"]


def requirements(name):
    for entry in groups[name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from requirements(entry["include-group"])


print(*requirements(sys.argv[1]), sep="\n")
PYTHON
}

install_packages() {
    local packages=(-e .) size="1 GB" quiet=--quiet group
    if [ "$level" = dev ]; then
        group=$(group dev) # by itself: a failure in <(…) would pass unseen
        mapfile -t packages <<<"$group"
        packages+=(-e '.[all]') size="1.8 GB"
    fi
    say "installing packages into .venv ($size; some minutes the first time)"
    [ -t 1 ] && quiet=
    # Without --no-compile pip compiles all modules, of which few are ever imported.
    .venv/bin/python -m pip install $quiet --disable-pip-version-check --prefer-binary --no-compile \
        -c constraints.txt "${packages[@]}" -e examples/marketplace
    .venv/bin/python -c "$demo_imports" || true # compiles what the processes of the demo import
}

java_command() {
    if [ -n "${JAVA_HOME:-}" ]; then echo "$JAVA_HOME/bin/java"; else echo java; fi
}

java_is_recent() {
    local version
    version=$("$(java_command)" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
    [ "${version:-0}" -ge 17 ]
}

find_java() {
    java_is_recent && return
    local package
    if as_root_with_apt && [ -z "${JAVA_HOME:-}" ]; then
        for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do
            say "no Java 17 or newer found: installing $package for Spark"
            if apt_install "$package" && java_is_recent; then
                return
            fi
        done
    fi
    say "no Java 17 or newer found${JAVA_HOME:+ in JAVA_HOME=$JAVA_HOME}; only Spark needs it." \
        "Install it with: sudo apt-get install --no-install-recommends openjdk-17-jre-headless"
}

if command -v flock >/dev/null; then
    exec 9<. && flock 9 # two makes at once: the second one waits, and finds the work done
fi

if ! up_to_date; then
    if ! recent_enough .venv/bin/python; then
        make_venv
    fi
    install_packages
    find_java
    if [ "$level" = demo ]; then wanted >"$stamp-demo"; else wanted >"$stamp"; fi
    say "ready"
elif ! command -v "$(java_command)" >/dev/null; then
    find_java
fi
