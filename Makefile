# Every target sets itself up: .venv is made on first use and refreshed when the pins or the ranges change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo fast test test-all test-slow check mutation docs wheel-check clean

$(READY): pyproject.toml train/pyproject.toml benchmarks/pyproject.toml constraints.txt
	@echo "make: setting up $(VENV) takes 2 to 10 minutes, most of it downloads; later starts skip it"
	@echo "make: 1 of 3: an empty environment, some seconds"
	@$(PYTHON) -m venv $(VENV)
	@echo "make: 2 of 3: PyTorch, 0.2 GB for the CPU alone, up to 3 GB with CUDA"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	@echo "make: 3 of 3: everything else, about 100 packages"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[train,trainer,bench,test,docs]' -e train -e benchmarks
	touch $@

demo: $(READY)  ## train a small Llama on real long documents over 2 local ranks
	@echo "make: training 100 steps, about 4 minutes on 2 cores; a bar, or a line each step, has the time that is left"
	$(BIN)/burst train --ranks 2 --out runs/demo --overwrite --resume auto

fast: $(READY)  ## what to run after every edit: under two minutes
	$(BIN)/python -m pytest -q tests/unit --ignore tests/unit/test_triton.py --ignore tests/unit/test_report_browser.py

test: $(READY)  ## the everyday suite: 23 minutes on two quiet cores
	$(BIN)/python -m pytest

# Ranks wait for one another about a third of the time. The unit tests run meanwhile; their output follows.
# LONG_MINUTES=n starts no long test after n minutes. CI sets it, because its time is limited.
test-all: LONG = -m "not slow" $(if $(LONG_MINUTES),--long-minutes $(LONG_MINUTES))
test-all: $(READY)  ## the everyday suite and the long tests: 45 minutes on two quiet cores
	@log=$$(mktemp); $(BIN)/python -m pytest $(LONG) tests/unit > $$log 2>&1 & unit=$$!; \
	$(BIN)/python -m pytest $(LONG) --ignore tests/unit; ranks=$$?; \
	wait $$unit; unit=$$?; cat $$log; rm $$log; exit $$((ranks > unit ? ranks : unit))

test-slow: $(READY)  ## the exhaustive tests alone
	$(BIN)/python -m pytest -m slow

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutation: $(READY)  ## seed faults one at a time and see the suite catch each
	$(BIN)/python tests/tools/mutation.py

docs: $(READY)  ## the documentation site in site/, every warning an error, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel-check: $(READY)  ## a wheel in an empty environment: what works without extras, and what says which it needs
	$(BIN)/python -m pytest -m slow tests/unit/test_package.py

clean:
	rm -rf $(VENV) runs site
