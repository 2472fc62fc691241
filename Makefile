# make demo     install, then one training run of the tiny model to its table of zeros
# make test     install what is missing, then every test
# make install  .venv with the three packages and their pinned dependencies
# make gpu-gate   on a GPU host: rollout and trainer exact in every configuration that fits it
# make lint     ruff, mypy and the pre-commit hooks' other checks
# make benchmarks OUT=FOLDER   every kernel benchmark on the GPU present, its proof first
# make sync-schema   check the vendored copies (repair: tools/sync_schema.py --write)

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP := $(VENV)/bin/python -m pip
STAMP := $(VENV)/.installed
DEMO_ARGS ?=
TEST_ARGS ?=
GATE_ARGS ?=
# On a GPU host that brought its own packages there may be no .venv.
GATE_PYTHON = $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)

.PHONY: install demo test gpu-gate lint benchmarks sync-schema

install: $(STAMP)

$(STAMP): requirements.txt constraints.txt sglang_patch/pyproject.toml megatron_patch/pyproject.toml miles_launcher/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Python 3.11 is needed, found '$(PYTHON)'; name another with: make PYTHON=..."; exit 2; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --requirement requirements.txt
	touch $@

demo: $(STAMP)
	$(VENV)/bin/miles launch qwen3-tiny --tp 2 --device cpu $(DEMO_ARGS)

test: $(STAMP) sync-schema
	$(VENV)/bin/python -m pytest $(TEST_ARGS)

gpu-gate:
	$(GATE_PYTHON) -m miles_launcher.gpu_gate $(GATE_ARGS)

lint: $(STAMP) sync-schema
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# With PYTHON's packages, not .venv's: a GPU host brings its own torch and Triton.
benchmarks:
	PYTHONPATH=. $(PYTHON) -m benchmarks $(or $(OUT),$(error name the folder of the results: make benchmarks OUT=FOLDER))

# The checker needs the standard library only, so it runs before anything is installed.
sync-schema:
	$(PYTHON) tools/sync_schema.py
