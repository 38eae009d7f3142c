# Every target sets itself up: .venv is made on first use and refreshed when the pins or the ranges change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := pyproject.toml benchmarks/pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Without a GPU, PyTorch's build for the CPU is enough: 0.2 GB in place of 3 GB. Where that index can't be reached, the
# next step takes what pip finds.
CPU_BUILD := command -v nvidia-smi > /dev/null || $(PIP) --quiet --retries 0 --no-deps \
	--index-url https://download.pytorch.org/whl/cpu torch || true
# One file's tests stay in one process, which shares its models and its pools of ranks.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo fast test test-all test-for test-slow check mutation docs wheel-check clean

$(VENV)/.demo: $(PINS)
	@echo "make: installing what training needs in $(VENV): 1 to 4 minutes, most of it downloads"
	@$(PYTHON) -m venv $(VENV)
	@echo "make: 1 of 2: without a GPU, PyTorch's build for the CPU, if its index can be reached"
	@$(CPU_BUILD)
	@echo "make: 2 of 2: everything else"
	@$(PIP) -e '.[hf]'
	@touch $@

$(VENV)/.ready: $(PINS)
	@echo "make: installing everything in $(VENV): 2 to 10 minutes, most of it downloads"
	@$(PYTHON) -m venv $(VENV)
	@echo "make: 1 of 2: without a GPU, PyTorch's build for the CPU, if its index can be reached"
	@$(CPU_BUILD)
	@echo "make: 2 of 2: everything else, about 100 packages"
	@$(PIP) -e '.[dev]' -e benchmarks
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## train a small Llama on real long documents over 2 local ranks
	@echo "make: training 100 steps, about 4 minutes on 2 cores; a bar, or a line each step, has the time that is left"
	$(BIN)/burst train --ranks 2 --out runs/demo --overwrite --resume auto

fast: $(VENV)/.ready  ## the unit tests but for Triton's interpreter: what to run after every edit
	$(PYTEST) -q tests/unit --ignore tests/unit/test_triton.py

test: $(VENV)/.ready  ## the everyday suite: about 10 minutes on two quiet cores
	$(PYTEST)

test-all: $(VENV)/.ready  ## the everyday suite and the long tests: what CI runs
	$(PYTEST) -m "not slow"

test-for: $(VENV)/.ready  ## the everyday tests of what depends on a package: make test-for PACKAGE=loss
	$(PYTEST) $$($(BIN)/python tests/tools/dependents.py $(PACKAGE))

test-slow: $(VENV)/.ready  ## the exhaustive tests alone
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.ready  ## ruff, mypy and the import law
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

mutation: $(VENV)/.ready  ## seed faults one at a time and see the suite catch each
	$(BIN)/python tests/tools/mutation.py

docs: $(VENV)/.ready  ## the documentation site in site/, every warning an error, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel-check: $(VENV)/.ready  ## a wheel in an empty environment: what works without extras, and what says which it needs
	$(BIN)/python -m pytest -m slow tests/unit/test_package.py

clean:
	rm -rf $(VENV) runs site
