# Everything works from a fresh machine with Python 3.11, a C++ compiler and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= serve_config.yaml
# Serve's settings for token streams, without the two of them that don't suit us: replicas would
# listen on ports of their own (and take 30 s to stop), and their logs would be hidden.
SERVE_ENV := RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_DIRECT_INGRESS=0 \
	RAY_SERVE_LOG_TO_STDERR=1 RAY_SERVE_CONTROL_LOOP_INTERVAL_S=0.5 PYTHONPATH=$(CURDIR)

.PHONY: serve test check demo install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,dev,bench,train]'
	touch $@

demo: install
	$(BIN)/python -m deploy.demo

serve: install $(if $(filter serve_config.yaml,$(CONFIG)),demo)
	$(BIN)/python -m deploy.check $(CONFIG)
	exec env $(SERVE_ENV) $(BIN)/serve run $(CONFIG)

test: demo
	GOMP_SPINCOUNT=1000 $(BIN)/pytest $(TESTS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
