PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
HOURS ?= 0.5
MINUTES ?= 60
VERSION ?= 2.15.0
FRAMEWORKS ?= diffusers litgpt onnx torchtitan training vllm

# The triton that each torch is made for.
TRITON_2.11 := 3.6.0
TRITON_2.12 := 3.7.0
TRITON_2.12.1 := 3.7.1
TRITON_2.13 := 3.7.1
TRITON_2.14 := 3.8.0
TRITON_2.15 := 3.9.0

bin := $(VENV)/bin

.PHONY: help demo demo-distributed test test-long test-all test-torch test-grids test-ptx test-integrations test-browser fits support fuzz load mutants lint docs release-check clean

help:
	@sed -n 's/^\([a-z0-9.-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(VENV)/.ready  ## train a small transformer on the CPU
	$(bin)/python examples/packed_gpt.py
	@echo "flex_inductor: demo finished"

demo-distributed: $(VENV)/.ready  ## train one over four processes
	$(bin)/python -m torch.distributed.run --nproc-per-node 4 examples/context_parallel.py
	@echo "flex_inductor: distributed demo finished"

test: $(VENV)/.ready  ## the tests, but those that take long
	$(bin)/python -m pytest -n 2 --dist worksteal -m "not long and not slow and not gpu" --cells=build/cells/test.json
	@echo "flex_inductor: tests passed"

test-long: $(VENV)/.ready  ## those that take long, which CI runs too
	$(bin)/python -m pytest -n 2 --dist worksteal -m "long and not slow and not gpu" --cells=build/cells/long.json
	@echo "flex_inductor: long tests passed"

test-all: $(VENV)/.ready  ## all tests, with the slow matrix, all compiled as users have it
	CXX=$(CXX) $(bin)/python -m pytest -n 2 --dist worksteal -m "not gpu"
	@echo "flex_inductor: all tests passed"

test-torch: build/constraints-$(VERSION).txt  ## the tests in an environment with another torch, VERSION=2.15.0
	@$(MAKE) --no-print-directory test test-long VENV=.venv-$(VERSION) CONSTRAINTS=$<

build/constraints-%.txt: constraints.txt Makefile
	@mkdir -p build
	sed 's/^torch==.*/torch==$*/; s/^triton==.*/triton==$(or $(TRITON_$*),$(TRITON_$(basename $*)),$(error no triton is known for torch $*: add it to the Makefile))/' $< > $@

fuzz: $(VENV)/.ready  ## random calls against the reference, for HOURS=0.5
	$(bin)/python -W ignore -m tests.fuzz --hours $(HOURS)
	@echo "flex_inductor: nothing found"

support: $(VENV)/.ready  ## what the last `make test test-long` served and judged, into docs/support.md
	$(bin)/python -m tests.cells build/cells/test.json build/cells/long.json --out docs/support.md

load: $(VENV)/.ready  ## calls from eight threads beside a compiling one, for MINUTES=60
	$(bin)/python -W ignore -m tests.load --minutes $(MINUTES)

test-grids: $(VENV)/.ready  ## 2,000 of the cases of others' published tests, WHOLE=1 for all, resumed
	$(bin)/python -m tests.grids $(if $(WHOLE),--whole)
	@echo "flex_inductor: grids passed"

mutants: $(VENV)/.ready  ## changes that make it wrong: whether `make test` would find them
	$(bin)/python -m tests.mutants
	@echo "flex_inductor: every change found"

test-ptx: $(VENV)/.ready  ## all kernels for cards, executed without one
	$(bin)/python -m pytest -n 2 --dist worksteal -m "not gpu" tests/tools/ptx
	@echo "flex_inductor: kernels executed"

fits: $(VENV)/.ready  ## what kernels take of every card, into docs/fits.md
	$(bin)/python -W ignore -m flex_inductor.tools.fits --out docs/fits.md
	@echo "flex_inductor: every kernel fits"

test-integrations: $(FRAMEWORKS:%=test-with-%)  ## other frameworks, each in an environment of its own
	@echo "flex_inductor: integrations passed"

test-with-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest tests/integrations/$*

.PRECIOUS: .venv-%/.ready
.venv-%/.ready: tests/integrations/%/constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet -c $< -e '.[$*]' pytest pytest-xdist expecttest
	for extra in torchvision torchaudio torchcodec; do \
		.venv-$*/bin/python -c "import $$extra" 2>/dev/null || .venv-$*/bin/python -m pip uninstall --quiet --yes $$extra; \
	done  # asked for by others, who run without them, and made for CUDA where pip sees PyPI alone
	touch $@

test-browser: $(VENV)/.ready  ## the web pages in headless Chromium, and the inspector's picture in docs/
	$(bin)/python -m pytest tests/tools/browser_webpage.py tests/tools/browser_playground.py
	@echo "flex_inductor: browser tests passed"

lint: $(VENV)/.ready  ## formatting, rules and types
	$(bin)/python -m ruff format --check .
	$(bin)/python -m ruff check .
	rm -rf build/mypy && mkdir -p build/mypy/flex_inductor
	ln -s $(addprefix ../../../,$(wildcard flex_inductor/*) lowerings templates tools) build/mypy/flex_inductor
	$(bin)/python -m mypy
	@echo "flex_inductor: lint passed"

docs: $(VENV)/.docs  ## the site, into build/docs/html
	PYTHONPATH=docs TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/docs/inductor \
		$(bin)/python -m sphinx -W --keep-going -q -d build/docs/doctrees docs build/docs/html \
		|| { rm -rf build/docs/doctrees; exit 1; }  # else the next run would not warn again
	$(bin)/python docs/_ext/links.py build/docs/html
	@echo "flex_inductor: docs built: build/docs/html/index.html"

$(VENV)/.docs: $(VENV)/.ready
	$(bin)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

release-check: $(VENV)/.release  ## the sdist and the wheel, tried alone on the oldest and the newest torch
	$(bin)/python -m tests.release

$(VENV)/.release: $(VENV)/.ready
	$(bin)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[release]'
	touch $@

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[test,lint,draw]'
	touch $@

clean:  ## remove environments, builds and caches
	rm -rf .venv .venv-* build dist docs/made *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
