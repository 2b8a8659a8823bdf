# Two commands on a fresh machine: `make demo`, `make test`. Both install into .venv first.
#
# HETERO_LLM_SYSTEM_TORCH=1 uses the torch (and other packages) that are already installed for
# PYTHON instead of the pinned one; PYTHON chooses the interpreter (3.11 to 3.13).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

ifeq ($(HETERO_LLM_SYSTEM_TORCH),1)
  VENV_FLAGS := --system-site-packages
  CONSTRAINTS :=
else
  VENV_FLAGS :=
  CONSTRAINTS := -c constraints.txt
endif

.PHONY: install demo test test-native check format docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP) $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/hetero-llm demo

test: $(STAMP)
	$(BIN)/python -m pytest

# The tests of the step executor under AddressSanitizer and UBSan, whose runtime has to be loaded
# before Python itself. Python and torch leak by design: only our memory errors count.
test-native: $(STAMP)
	$(BIN)/python -m hetero_llm.cpu.build --sanitize
	HETERO_LLM_NATIVE=sanitized ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD=$$(g++ -print-file-name=libasan.so) $(BIN)/python -m pytest tests/cpu/step

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hetero_llm/core hetero_llm/engine
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/gen_flags_doc.py --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python tools/gen_flags_doc.py

clean:
	rm -rf $(VENV) build dist *.egg-info
