# Every target sets itself up: .venv is made on first use and refreshed when the pins or the ranges change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo fast test test-all check mutation docs wheel-check clean

$(READY): pyproject.toml benchmarks/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,trainer,bench,test,docs]' -e benchmarks
	touch $@

demo: $(READY)  ## train a small Llama on real long documents over 2 local ranks
	$(BIN)/burst train --ranks 2 --out runs/demo --overwrite --resume auto

fast: $(READY)  ## what to run after every edit: under two minutes
	$(BIN)/python -m pytest -q tests/unit --ignore tests/unit/test_triton.py --ignore tests/unit/test_report_browser.py

test: $(READY)  ## the whole everyday suite
	$(BIN)/python -m pytest

test-all: $(READY)  ## the same with what is marked slow
	$(BIN)/python -m pytest -m "slow or not slow"

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutation: $(READY)  ## seed faults one at a time and see the suite catch each
	$(BIN)/python tests/mutation.py

docs: $(READY)  ## the documentation site in site/, every warning an error, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel-check: $(READY)  ## a wheel in an empty environment: what works without extras, and what says which it needs
	$(BIN)/python -m pytest -m slow tests/unit/test_package.py

clean:
	rm -rf $(VENV) runs site
