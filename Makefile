PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt

bin := $(VENV)/bin

.PHONY: demo test test-all test-2.11 lint clean

demo: $(VENV)/.ready
	$(bin)/python examples/train_demo.py
	@echo "flex_inductor: demo finished"

test: $(VENV)/.ready
	$(bin)/pytest -n 2 -m "not slow and not gpu"
	@echo "flex_inductor: tests passed"

test-all: $(VENV)/.ready
	$(bin)/pytest -n 2 -m "not gpu"
	@echo "flex_inductor: all tests passed"

# The other end of the supported range of torch.
test-2.11:
	@$(MAKE) --no-print-directory test VENV=.venv-2.11 CONSTRAINTS=constraints-2.11.txt

lint: $(VENV)/.ready
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	rm -rf build/mypy && mkdir -p build/mypy/flex_inductor
	ln -s $(addprefix $(CURDIR)/,$(wildcard flex_inductor/*) lowerings templates tools) build/mypy/flex_inductor
	$(bin)/mypy
	@echo "flex_inductor: lint passed"

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[test,lint,draw]'
	touch $@

clean:
	rm -rf .venv .venv-2.11 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
