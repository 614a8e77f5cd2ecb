# One environment, .venv, for everything here; needs Python >= 3.11 and a C compiler.
#   make demo PYTHON=python3.12     builds it with another Python
#   make demo PIP_ARGS="..."        passes options to pip; PyTorch's installation page names its index of CPU builds, which
#                                   saves gigabytes on Linux without a GPU
#   make demo LOCKED=1              installs the very files whose hashes stand in requirements.lock, for Linux (x86-64),
#                                   Python 3.11 and PyTorch's CPU build
PYTHON ?= python3
PIP_ARGS ?=

BIN := .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
INSTALL = $(if $(LOCKED),$(PIP) --no-deps --require-hashes -r requirements.lock && \
	$(PIP) --no-deps --no-build-isolation -e .,$(PIP) -c constraints.txt -e '.[$(EXTRAS)]')

.DEFAULT_GOAL := help
.PHONY: help demo test test-changed test-ci test-all mutants test-quantized test-oldest test-oldest-quick lab docs slides bench bench-kernels bench-gpu gpu pictures lint embedded-pair encoder-decoder-pair clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: .venv/.installed-notebooks ## batched speculative decoding on the embedded models, checked and timed
	$(BIN)/bass demo

TEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --durations=25
BASE ?= origin/main

test: .venv/.installed-test ## run what a change can break, every lesson included, on all cores
	$(TEST)

test-changed: .venv/.installed-test ## run what the difference to BASE (origin/main) reaches, in about a minute
	@tests=$$($(BIN)/python tests/support/changed.py $(BASE)) && $(TEST) $$tests

test-ci: .venv/.installed-test ## run the slow tests that catch what `make test` does not
	$(TEST) -m ci

test-all: .venv/.installed-test ## run everything: all kinds of models, kills, Ray, the oldest versions
	$(TEST) -m ""
	$(MAKE) test-quantized test-oldest

mutants: .venv/.installed-test ## write one bug at a time into a copy of the code; a test has to fail (ARGS="--only engine")
	$(BIN)/python tests/mutants/run.py $(ARGS)

# torchao prints into every program that imports transformers, so it stays out of .venv.
build/torchao: .venv/.installed-test
	$(PIP) --quiet --no-deps --target $@ torchao==0.18.0

test-quantized: build/torchao ## run the tests of quantized models
	PYTHONPATH=.:kernels:build/torchao $(BIN)/python -m pytest tests/engine/test_quantized.py

# What a GPU box runs first, on what it may bring: the oldest versions that pyproject.toml promises, the newest numpy, and
# nothing that draws or runs notebooks. Left out are tables of what the pinned versions do.
OLDEST = torch==2.11.0 transformers==5.17.0 numpy pandas tqdm typer scipy llguidance pytest pytest-timeout pytest-xdist
OLDEST_PYTHON ?= $(shell python3.12 --version > /dev/null 2>&1 && echo python3.12 || echo $(PYTHON))
OLDEST_TESTS = tests/kernels tests/exactness tests/gpu tests/policies tests/engine tests/lab/test_bench_gpu.py tests/lab/test_gpu_stages.py \
	$(addprefix --ignore=tests/,exactness/test_kinds.py engine/test_packaging.py engine/test_loading.py \
	engine/test_support.py)
QUICK = tests/kernels/test_interpreter.py tests/kernels/test_kernel_compile.py tests/engine/test_recorded_steps.py \
	tests/engine/test_graphs.py tests/engine/test_compiled_layers.py tests/exactness/test_greedy_identity.py tests/lab/test_bench_gpu.py

test-oldest: .venv-oldest/.installed ## run what a GPU box runs first, on the oldest versions we promise (downloads 3 GB)

test-oldest-quick: .venv-oldest/.installed ## the same in a few minutes: kernels, recorded and compiled steps, identity

test-oldest-quick: OLDEST_TESTS = $(QUICK)
test-oldest test-oldest-quick:
	PYTHONPATH=.:kernels .venv-oldest/bin/python -m pytest -n auto --dist loadfile -m "not slow" $(or $(ARGS),$(OLDEST_TESTS))

lab: .venv/.installed-notebooks ## open JupyterLab on the lessons
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

docs: .venv/.installed-docs ## execute every lesson, and build a site of them and all documentation: build/site
	$(BIN)/bass notebooks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html; for its search: $(BIN)/python -m http.server --directory build/site"

# reveal.js and require.js come from a CDN when the slides are opened. Without a network, in build/lessons:
#   npm pack reveal.js@4.6.1 requirejs@2.3.6, unpack them as reveal.js and requirejs, and
#   make slides SLIDES="--reveal-prefix reveal.js --SlidesExporter.require_js_url=requirejs/require.js"
slides: .venv/.installed-notebooks ## execute lesson 14, the paper, into slides: build/lessons/14_the_paper.slides.html
	$(BIN)/bass notebooks 14
	$(BIN)/jupyter nbconvert --to slides --log-level WARN --TagRemovePreprocessor.enabled=True \
		--TagRemovePreprocessor.remove_input_tags=output-only --SlidesExporter.reveal_scroll=True \
		--SlidesExporter.reveal_width=1600 --SlidesExporter.reveal_height=900 $(SLIDES) build/lessons/14_the_paper.ipynb

bench: .venv/.installed-notebooks ## time all ways to decode with the embedded pair, on both prompt sets
	$(BIN)/bass bench

bench-kernels: .venv/.installed-notebooks ## time the Triton kernels against their peers (needs a CUDA GPU)
	PYTHONPATH=.:kernels $(BIN)/python -m bass_lab.gpu.kernels $(ARGS)

gpu: .venv/.installed-test ## all that a GPU is asked, in stages of minutes, into build/gpu (ARGS=--rehearse: on a CPU)
	PYTHONPATH=.:kernels $(BIN)/python -m bass_lab.gpu.stages build/gpu $(ARGS)

bench-gpu: .venv/.installed-notebooks ## time decoding at real sizes, ends after ten minutes (needs a CUDA GPU; ARGS=--quick: three)
	PYTHONPATH=.:kernels $(BIN)/python -m bass_lab.gpu.decoding $(ARGS)

pictures: .venv/.installed-test ## draw the README's pictures again (needs Chromium)
	$(BIN)/bass pictures

lint: .venv/.installed-test ## check format, style, imports, line budgets and prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYTHONPATH=.:kernels $(BIN)/lint-imports --no-cache
	$(BIN)/python tests/support/budgets.py
	$(BIN)/python tests/support/prose.py

embedded-pair: .venv/.installed-notebooks ## train the embedded models again (two hours on two cores; goes on where it was cut off)
	$(BIN)/python -m bass_lab.pair.training
	$(BIN)/python -m bass_lab.pair.data_card

encoder-decoder-pair: .venv/.installed-notebooks ## train the embedded encoder-decoder pair again (half an hour on two cores; goes on where it was cut off)
	$(BIN)/python -m bass_lab.pair.encoder_decoder
	$(BIN)/python -m bass_lab.pair.encoder_decoder_card

clean: ## remove what was built and the caches; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -exec rm -rf {} +

# The stamps stand for "installed since these files last changed", so that a second run starts at once.
.venv/.installed-notebooks: EXTRAS = notebooks
.venv/.installed-notebooks: pyproject.toml setup.py constraints.txt requirements.lock | $(BIN)/pip
	@echo "==> Installing the pinned versions into .venv (downloads hundreds of MB the first time)"
	$(INSTALL)
	@touch $@

.venv/.installed-docs: EXTRAS = notebooks,docs
.venv/.installed-docs: pyproject.toml setup.py constraints.txt requirements.lock | $(BIN)/pip
	@echo "==> Installing the pinned versions and MkDocs into .venv (downloads hundreds of MB the first time)"
	$(INSTALL)
	@touch .venv/.installed-notebooks $@

# Includes all that the notebooks need, hence both stamps.
.venv/.installed-test: EXTRAS = notebooks,test
.venv/.installed-test: pyproject.toml setup.py constraints.txt requirements.lock | $(BIN)/pip
	@echo "==> Installing the pinned versions and the test tools into .venv (downloads hundreds of MB the first time)"
	$(INSTALL)
	@touch .venv/.installed-notebooks $@

.venv-oldest/.installed: pyproject.toml
	@echo "==> Installing the oldest versions into .venv-oldest with $$($(OLDEST_PYTHON) --version) (downloads 3 GB)"
	$(OLDEST_PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) $(OLDEST)
	@touch $@

# pip is the last thing that venv writes: where it is missing, an earlier attempt was cut short.
$(BIN)/pip:
	@command -v $(PYTHON) > /dev/null || { \
		echo "There is no $(PYTHON) here. Install Python >= 3.11, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and 3.11 or newer is needed. Name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "$(PYTHON) lacks the module venv (or ensurepip). On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "==> Making .venv with $$($(PYTHON) --version)"
	$(PYTHON) -m venv .venv
