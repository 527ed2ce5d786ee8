# make serve   fetch the embedded default model and serve it      make serve ARGS="--port 9000"
# make test    run the tests                                      make test ARGS="tests/config"
# make check   lints, format and types
# make bench   measure the server with the embedded model
# make docs    renew the generated pages
#
# VENV and PYTHON may be set: make test VENV=/tmp/venv PYTHON=python3.12

VENV ?= .venv
ARGS ?=
IS_SUPPORTED := -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
# The first Python that the package supports.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p $(IS_SUPPORTED) && echo $$p && break; done)

BIN := $(VENV)/bin
# Exact versions that this release is tested with; pip picks the build of torch that its index offers.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c requirements/tested.txt
SERVE_READY := $(VENV)/.tokenspeed-serve
DEV_READY := $(VENV)/.tokenspeed-dev
INPUTS := pyproject.toml requirements/tested.txt

# A failed `venv` (Debian without python3-venv) leaves a python without pip, which the next call would take for done.
.DELETE_ON_ERROR:

.PHONY: serve test check bench docs install install-dev

serve: install
	$(BIN)/tokenspeed serve $(ARGS)

test: install-dev
	$(BIN)/python -m pytest $(ARGS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install-dev
	$(BIN)/python benchmarks/serving.py --model default --concurrency 1,8 $(ARGS)

docs: install-dev
	$(BIN)/python -m tokenspeed.config.flag_docs page > docs/configuration/server.md
	$(BIN)/python -m tokenspeed.config.flag_docs freeze > tests/config/flags.txt

install: $(SERVE_READY)

install-dev: $(DEV_READY)

$(BIN)/python:
	@$(or $(PYTHON),false) $(IS_SUPPORTED) || { \
		echo "TokenSpeed needs Python 3.11, 3.12 or 3.13$(if $(PYTHON),; $(PYTHON) is not one, on the PATH)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SERVE_READY): $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) -e .
	touch $@

$(DEV_READY): $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[test,dev,bench]'
	touch $@ $(SERVE_READY)
