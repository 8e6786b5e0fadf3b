# Paceline: `make demo` to see it, `make test` to check it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_READY := $(FRAMEWORKS)/.ready
WEB_READY := web/node_modules/.ready
ARGS ?=
# Many tests wait for processes and sockets: two workers per core keep the cores busy.
JOBS ?= $(shell n=$$(( $$(nproc) * 2 )); echo $$(( n < 8 ? n : 8 )))
ONLY ?=

# Tests and demo start hundreds of processes; bytecode caches make each start faster.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check bench campaign audit fix clean lint types web unit alone others browser goldens

demo: $(READY)
	@exec $(BIN)/paceline demo --exit-with-parent $(ARGS)

# The checks run beside the tests, which wait for a part of the time. The output of each stays together.
test: $(READY) $(WEB_READY) browser
	@$(MAKE) --no-print-directory alone
	@$(MAKE) --no-print-directory --jobs 3 others check

check: $(READY) $(WEB_READY)
	@$(MAKE) --no-print-directory --output-sync=target $(if $(findstring -j,$(MAKEFLAGS)),,--jobs 2) types web lint

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

web: $(WEB_READY)
	cd web && npm run --silent check && npm run --silent lint && npm run --silent test && npm run --silent verify

unit: $(READY) browser
	@$(MAKE) --no-print-directory alone
	@$(MAKE) --no-print-directory others

# One process: it also caches the compiled test files for the parallel ones.
alone: $(READY)
	$(BIN)/pytest -m "alone and not campaign"

others: $(READY)
	$(BIN)/pytest -m "not campaign and not alone" -n $(JOBS) --dist loadfile --no-loadscope-reorder

bench: $(READY)
	$(BIN)/python -m benchmarks --json bench.json $(ONLY)

campaign: $(READY) $(FRAMEWORKS_READY)
	@$(BIN)/pip install --quiet --group campaign
	PACELINE_FRAMEWORKS_PYTHON=$(FRAMEWORKS)/bin/python $(BIN)/pytest -m campaign --timeout 3600
	@$(PYTHON) -m venv $(FRAMEWORKS)-launched
	@$(FRAMEWORKS)-launched/bin/pip install --quiet --upgrade "pip>=25.1"
	@$(FRAMEWORKS)-launched/bin/pip install --quiet --editable . --group launched-frameworks
	$(FRAMEWORKS)-launched/bin/pytest -m campaign tests/trainer_hooks/integrations/test_launched_frameworks.py \
		tests/trainer_hooks/checkpoints/test_requests.py

$(FRAMEWORKS_READY): pyproject.toml
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/pip install --quiet --upgrade "pip>=25.1"
	@DS_BUILD_OPS=0 $(FRAMEWORKS)/bin/pip install --quiet --editable . --group frameworks
	@touch $@

# Known vulnerabilities of the dependencies; needs an index that serves advisories.
audit: $(READY) $(WEB_READY)
	@$(BIN)/pip install --quiet --group audit
	$(BIN)/pip-audit --skip-editable --progress-spinner off
	cd web && npm audit --omit=dev

# Writes the expected /metrics of the frozen nodes and the list of dependencies again; read the diff
# before committing it.
goldens: $(READY)
	PACELINE_WRITE_GOLDEN=1 $(BIN)/pytest -q tests/agent/expose/test_golden.py \
		tests/house/test_dependencies.py

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(FRAMEWORKS)-launched web/node_modules bench.json demo.json .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist

$(READY): pyproject.toml hatch_build.py trainer_hooks/paceline/writer/_native.c trainer_hooks/paceline/collectives/_process_groups.cpp
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; $(PYTHON) is " + sys.version.split()[0] + ". Try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) install_environment.py $(VENV)
	@$(BIN)/python -m paceline.collectives || true
	@touch $@

$(WEB_READY): web/package-lock.json
	@command -v npm >/dev/null || { echo "npm not found: the checks of the web page need Node 20 with npm (the product does not)" >&2; exit 1; }
	cd web && npm ci --silent --no-audit --no-fund
	touch $@

# Without Chromium the browser tests are skipped with a message.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& { apt-get install -qq -y chromium >/dev/null 2>&1 \
		|| { apt-get update -qq && apt-get install -qq -y chromium >/dev/null; }; }; } \
		|| echo "Chromium not found: the browser tests will be skipped" >&2
