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

NEWEST := .venv-newest

.PHONY: demo fast test test-all test-for test-long test-newest test-slow check mutation docs wheel-check clean

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

# Words as tokens and many short steps: after a few minutes of bytes, a model writes little but spaces.
demo: $(VENV)/.demo  ## train a small Llama on Python's sources over 2 local ranks, and print what it writes
	@echo "make: training 400 steps, about 4 minutes on 2 cores; a bar, or a line each step, has the time that is left"
	$(BIN)/python examples/train_tokenizer.py runs/demo-tokenizer
	$(BIN)/burst train --ranks 2 --tokenizer runs/demo-tokenizer --seq-len 1024 --steps 400 --out runs/demo \
		--overwrite --resume auto
	@echo "make: the trained model goes on after 'class Test(unittest.TestCase): def':"
	@printf 'import os\n\n\nclass Test(unittest.TestCase):\n    def' | $(BIN)/burst generate \
		--model runs/demo/model --prompt - --ranks 1 --temperature 0.8 --max-new-tokens 80 2> $(VENV)/demo.log \
		|| (cat $(VENV)/demo.log; false)

fast: $(VENV)/.ready  ## the unit tests but for Triton's interpreter: what to run after every edit
	$(PYTEST) -q tests/unit --ignore tests/unit/test_triton.py

test: $(VENV)/.ready  ## the everyday suite: about 15 minutes on two quiet cores
	$(PYTEST)

test-long: $(VENV)/.ready  ## the tests that repeat at length what the everyday suite touches
	$(PYTEST) -m "long and not slow"

test-all: test test-long  ## the everyday suite, then the long tests: what CI runs

# Without the pins: what a plain `pip install -e '.[hf]'` takes today. torch is then a CUDA build of several gigabytes.
test-newest:  ## the everyday suite on the newest releases, in .venv-newest
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]' -e benchmarks
	@$(NEWEST)/bin/python -m pip list 2> /dev/null | grep -iE '^(torch|transformers|triton|trl|peft|accelerate|numpy) '
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile
	@$(NEWEST)/bin/python -m pip list 2> /dev/null | grep -iE '^(torch|transformers|triton|trl|peft|accelerate|numpy) '

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
	rm -rf $(VENV) $(NEWEST) runs site
