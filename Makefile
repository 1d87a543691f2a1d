# `make demo` and `make test` do all set-up themselves, once. Both need only `make` and Python 3.10 or newer;
# another interpreter: `make demo PYTHON=python3.12`. Everything that they write is ignored by git.

PYTHON ?= python3
TORCH  := torch==2.13.0
VENV   := .venv
RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip --disable-pip-version-check -qq install
# The stamp's name holds a checksum, so set-up runs again when the requirements or the place change, and else never.
SUM    := $(shell (cat pyproject.toml; pwd) | cksum | cut -d' ' -f1)
STAMP  := $(VENV)/.ready-$(SUM)
DOCS   := $(VENV)/.docs-$(SUM)

export OMP_NUM_THREADS := 1

PAPER := structure time_series trees minimality tree_depths gaussian_mixture

.PHONY: demo test test-all test-seeds test-device contract lint docs bench paper setup clean
.NOTPARALLEL:

demo: setup  ## eight schools with Pyro's guides and this one; plots go to out/
	@$(RUN) examples/quickstart.py

test: setup  ## all tests and doctests, then the linters
	@$(RUN) -m pytest -q -n 2
	@$(MAKE) --no-print-directory lint

test-all: setup  ## all tests, with 2,000 random programs in place of 300
	@PYRO_NAMI_PROGRAMS=2000 $(RUN) -m pytest -q -n 2

test-seeds: setup  ## all tests with ten other seeds, each in an order of its own
	@for seed in 1 2 3 4 5 6 7 8 9 10; do PYRO_NAMI_SEED=$$seed $(RUN) -m pytest -q -n 2 || exit 1; done

test-device: setup  ## a second device without a GPU, and our tests on it, where the check is at hand; compiles for minutes
	@$(RUN) tests/second_device.py

contract: setup  ## Pyro's own guide tests on AutoNaMIGuide, where they are at hand
	@$(RUN) tests/contract.py

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check -q .
	@$(RUN) -m mypy

docs: $(DOCS)  ## the site, with all code on its pages run, in out/docs/html; the first time takes minutes
	@$(RUN) -m sphinx -q -j 2 -n -W --keep-going -b html -d out/docs/doctrees docs out/docs/html
	@echo "==> out/docs/html/index.html"

bench: setup  ## rewrites benchmarks/results/*.json; needs an idle machine
	@for script in benchmarks/*.py; do echo "==> $$script"; $(RUN) $$script || exit 1; done

paper: setup  ## rewrites examples/paper/results, hours; DATA=folder with MNIST for the last two
	@for script in $(PAPER); do echo "==> $$script"; $(RUN) examples/paper/$$script.py || exit 1; done
	@for script in vae semi_supervised; do echo "==> $$script"; \
	  $(RUN) examples/paper/$$script.py $(if $(DATA),--data $(DATA)) || exit 1; done

setup: $(STAMP)

$(STAMP):
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "There is no '$(PYTHON)' here. Install Python 3.10 or newer, or name one: make demo PYTHON=/path/to/python"; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed; '$(PYTHON)' is `$(PYTHON) --version 2>&1`. Name another: make demo PYTHON=python3.12"; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks the module venv or ensurepip. On Debian and Ubuntu: sudo apt install python3-venv"; \
	  exit 1; }
	@echo "==> 1/3 a virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "==> 2/3 torch (a large download; some minutes the first time)"
	@$(PIP) $(TORCH) 2>$(VENV)/pip.log || \
	  echo "    $(TORCH) cannot be had here; step 3 takes another version that pyproject.toml allows"
	@echo "==> 3/3 pyro_nami and what it needs"
	@$(PIP) -e '.[viz,dev]' || { echo "Set-up failed: pip's message is above. Is the network there?"; exit 1; }
	@touch $@
	@echo "==> ready"

$(DOCS): $(STAMP)
	@echo "==> what the documentation needs"
	@$(PIP) -e '.[viz,docs]' || { echo "Set-up failed: pip's message is above. Is the network there?"; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
