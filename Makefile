# Every target sets up what it needs first (scripts/setup.sh), once; ARGS="..." goes to the command.
SHELL := /bin/bash
ARGS ?=
# Tests run in so many processes, a file in one of them; 0 for all in one, as a debugger wants it.
# Twice two processors: half of them wait for a broker or a scheduler.
JOBS ?= 4
RUN := scripts/run.sh
# The longest files begin, in the order of tests/order.py; what is quick fills the rest.
# A crashed process ends the run: pytest-xdist 3.8 hangs if it replaces one (its issue 1378).
PYTEST = $(RUN) --rabbitmq --kafka --tables --quick-spark --in-memory --airflow airflow-test \
	pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-all test-browser docs screens lint matrix dist bench race soak faults cluster test-cluster mutants lock clean distclean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## Make .venv and find or install what else is needed; the other targets do it by themselves
	@scripts/setup.sh

demo: ## Drain a queue of 336,776 flights through Airflow and Spark, and report on every message
	@$(RUN) --airflow airflow python -m scripts.demo $(ARGS)

up: ## A local Airflow with its UI, on loopback, until Ctrl-C
	@exec $(RUN) python -m scripts.up $(ARGS)

test: ## The tests, but for slow ones and those in a browser; ARGS="-k word" for some of them
	@$(PYTEST) -m "not slow and not browser" $(ARGS)

test-all: ## All tests, the slow ones too, but for those in a browser; and the lines that they cover
	@$(subst --kafka,--kafka --s3a --cluster,$(PYTEST)) -m "not browser" --cov airflow_broadway --cov-report term:skip-covered $(ARGS)

test-browser: ## The pages in Airflow's UI, in a real Chromium; build/screens has a picture of each
	@$(RUN) --browser --rabbitmq --quick-spark --airflow airflow-test pytest -m browser --durations 10 tests/browser $(ARGS)

docs: ## The documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build $(ARGS)

screens: ## The pictures of the documentation, light and dark: the pages of test-browser
	@$(MAKE) test-browser ARGS="-k accessible"
	@cp build/screens/run-{light,dark}.png docs/screens/

lint: ## ruff, its formatter, imports between packages, mypy --strict; code lines by package
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) lint-imports --no-logo
	@$(RUN) mypy
	@$(RUN) python -m scripts.count_code

matrix: ## The built wheel on each supported Airflow and Python, in environments of build/matrix
	@$(RUN) pytest -v --durations 10 tests/matrix $(ARGS)

dist: ## Wheel and sdist in dist/, built the same each time, and checked
	@$(RUN) pytest -v tests/dist $(ARGS)
	@rm -rf dist && $(RUN) python -m hatchling build

bench: ## Messages per second of each stage and of the whole; build/bench.json
	@$(RUN) --kafka --airflow airflow-bench python -m tests.benchmarks $(ARGS)

race: ## The same queue drained into Parquet files by a loop, by other libraries and by this package, with kills; build/race.json
	@$(RUN) --rabbitmq --kafka --race --airflow airflow-race python -m tests.race $(ARGS)

soak: ## 10 million messages through overlapping runs; rows, memory and cost per message in ten windows; build/soak.json
	@$(RUN) --rabbitmq --airflow airflow-soak python -m tests.soak $(ARGS)

faults: ## Kill tasks at random instants and count every message; build/faults.json
	@$(RUN) --rabbitmq --kafka --quick-spark --airflow airflow-faults python -m tests.faults $(ARGS)

cluster: ## Flights through Airflow with Celery, PostgreSQL and a bucket on several hosts, counted; build/cluster.json
	@$(RUN) --rabbitmq --kafka --tables --cluster --airflow airflow-cluster python -m tests.cluster $(ARGS)

test-cluster: ## The same as a test
	@$(RUN) --rabbitmq --kafka --tables --cluster --airflow airflow-cluster pytest -m slow tests/cluster $(ARGS)

mutants: ## Break custody, settlement, staging and stages in 260 places, one at a time, and see the tests fail
	@$(RUN) --rabbitmq --tables --quick-spark --airflow airflow-mutants python -m tests.mutants $(ARGS)

lock: ## Compile requirements*.in to requirements*.lock anew; needs uv
	@for name in requirements-build requirements requirements-cluster; do \
		uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
			--no-emit-index-url --no-emit-find-links $(ARGS) "$$name.in" -o "$$name.lock" || exit 1; \
	done
	@awk '/^[a-z]/ { known = ($$1 in seen); if (FNR == NR) { seen[$$1] = 1 } } FNR < NR && !known' \
		requirements.lock requirements-cluster.lock >build/cluster.lock && mv build/cluster.lock requirements-cluster.lock

clean: ## Remove what the targets made, but for .venv
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	@rm -rf .venv
