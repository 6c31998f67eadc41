# make run and make test do their own set-up; make help lists the rest.

BIN := .venv/bin
# More than two cores have: most tests wait for a server most of the time.
WORKERS ?= 4
TESTS ?= tests
export WORKERS
# Images of Python often set it: then each of the many processes would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-demo run run-outbox-publisher build test coverage test-slow test-compat test-python soak peers audit lint format bench round-trips docs docs-serve clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1|/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-20s %s\n' "$$name" "$$text"; done

setup: ## virtual environment, packages and Java; nothing to do when nothing changed
	@scripts/setup.sh dev

setup-demo: ## the same with what the demo needs, and no more
	@scripts/setup.sh demo

run: setup-demo ## the demo: orders, workers (one is killed), relays, Spark, verdict, report
	@$(BIN)/conquiet demo $(DEMO)

run-outbox-publisher: setup ## the relay: publishes an outbox; settings in docs/outbox.md
	@if [ -z "$$CONQUIET_DATABASE_URL$$CONQUIET_CONFIG" ]; then \
		export CONQUIET_DATABASE_URL=sqlite:///outbox.sqlite; \
		export CONQUIET_OUTBOX_CATALOG="$${CONQUIET_OUTBOX_CATALOG:-marketplace.catalog:CATALOG}"; \
		$(BIN)/conquiet outbox migrate || exit; \
	fi; \
	exec $(BIN)/conquiet relay run

build: setup ## the package, with its command, into dist/; and its image, where Docker runs
	@$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	@if docker info >/dev/null 2>&1; then docker build --quiet --tag conquiet .; \
	else echo "no Docker here: the package alone"; fi

# In a new clone the test files are compiled once, while mypy leaves a core free; each of the workers would.
test: setup ## lint, types, import rules, then the tests
	@[ -e tests/__pycache__ ] || $(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 & \
		$(MAKE) --no-print-directory lint; status=$$?; wait; exit $$status
	@echo "==> tests"
	@rm -f .venv/left-out
	@LEFT_OUT=.venv/left-out scripts/pytest.sh -q -n $(WORKERS) --dist loadgroup -m "not slow" \
		|| { cat .venv/left-out 2>/dev/null; exit 1; }
	@cat .venv/left-out 2>/dev/null || true

coverage: setup ## the same tests, traced, which takes half as long again; which lines they reach
	@scripts/pytest.sh -q -n $(WORKERS) --dist loadgroup --cov --cov-report= -m "not slow"
	@$(BIN)/coverage report

test-slow: setup ## the long tests: kills by the dozen, other projects' suites, Spark clusters
	@scripts/pytest.sh -q -n $(WORKERS) --dist loadgroup -m slow $(TESTS)

test-compat: setup ## the tests that talk to servers, on the other servers of this machine
	@scripts/compat.sh

test-python: setup ## core, SQL and Redis on the other versions of Python of this machine, and on uvloop
	@scripts/pythons.sh

soak: setup ## faults at random for MINUTES=30, or kills while MESSAGES=1000000 pass; a report in soak/
	@$(BIN)/python scripts/soak.py \
		$(if $(MESSAGES),--messages $(MESSAGES),--minutes $(or $(MINUTES),30)) $(SOAK)

peers: setup ## other libraries and conquiet under the same kills, into docs/reliability.md
	@$(BIN)/python scripts/peers.py $(PEERS)

audit: setup ## bandit, whose findings SECURITY.md answers; pip-audit, where its service is in reach
	@test -x .venv-audit/bin/pip-audit || { $(BIN)/python -m venv .venv-audit && \
		.venv-audit/bin/pip install --quiet --disable-pip-version-check -c constraints.txt bandit pip-audit; }
	@.venv-audit/bin/python scripts/audit.py

lint: setup ## ruff, mypy and import-linter; changes nothing
	@echo "==> lint and types"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## let ruff format and fix
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

bench: setup ## every benchmark, short, collected into docs/performance.md
	@$(BIN)/python bench/collect.py

round-trips: setup ## count statements and round trips per message into tests/round_trips.toml, which the tests compare
	@ROUND_TRIPS=write $(BIN)/python -m pytest -q -n 0 tests/integration/test_round_trips.py
	@git diff --stat -- tests/round_trips.toml

docs: setup ## the docs as a site, into site/; a broken link or a missing page fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

docs-serve: setup ## the site on http://127.0.0.1:8000, built again whenever a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict --watch src

clean: ## remove everything that make has built, .venv included
	rm -rf .venv .venv-peer* .venv-python-* .venv-audit .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache dist build site soak spark-warehouse metastore_db derby.log \
		conquiet-demo
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
