# Every target makes its virtual environment when it is missing, of another interpreter, or older than pyproject.toml.
#
#   make demo                                   the bundled model answers several prompts out of one paged pool
#   make test [MARK=jax_matrix] [ARGS="-k pool"]
#   make test MARK=aot                          compiles the kernels for GPUs and TPUs that are not here
#   make reproduce [ARGS="--only memory_waste"]  the paper's experiments on a CPU, and experiments/results/REPORT.md
#   make lint
#   make bench [ARGS="--against transformers"]
#
#   PYTHON=python3.12   another interpreter, with an environment of its own (.venv-3.12)
#   TORCH=1 or 0        with torch or without; by default, with it where pip would take a build for the CPU
#   JOBS=2              test processes

comma := ,
PYTHON ?= python3
TORCH ?= auto
JOBS ?= 2
MARK ?=
ARGS ?=

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(if $(filter file default,$(origin PYTHON)),.venv,.venv-$(PYTHON_VERSION))$(if $(filter aot,$(MARK)),-aot)
EXTRAS := test$(if $(filter aot,$(MARK)),$(comma)aot)
STAMP := $(VENV)/.installed-$(PYTHON_VERSION)
TORCH_STAMP := $(VENV)/.torch-$(TORCH)
TORCH_SPEC := $(shell sed -n 's/^torch = \["\(.*\)"\]$$/\1/p' pyproject.toml)
PIP := $(VENV)/bin/python -m pip -qq --disable-pip-version-check

.PHONY: demo test reproduce lint bench venv clean

demo: $(STAMP)
	@$(VENV)/bin/python -m pagedjax.demo $(ARGS)

test: $(STAMP) $(TORCH_STAMP)
	@JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup $(if $(MARK),-m $(MARK)) $(ARGS)

reproduce: $(STAMP)
	@JAX_PLATFORMS=cpu $(VENV)/bin/python -m experiments reproduce $(ARGS)

lint: $(STAMP) $(TORCH_STAMP)
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

bench: $(STAMP) $(TORCH_STAMP)
	@$(VENV)/bin/pagedjax bench $(ARGS)

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagedjax needs Python 3.11 or newer; this is %s: choose one with PYTHON=" % sys.version.split()[0])'
	@echo "making $(VENV) with Python $(PYTHON_VERSION) (a few minutes)"
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --editable '.[$(EXTRAS)]'
	@rm -f $(VENV)/.torch-*
	@touch $@

# What pip would take is asked without taking it: a local version "+cpu", or any build for macOS, is small.
$(TORCH_STAMP): $(STAMP)
	@case '$(TORCH)' in \
	  auto) $(PIP) install --dry-run --no-deps --ignore-installed --report - $(TORCH_SPEC) 2>/dev/null \
	      | $(PYTHON) -c 'import json, sys; v = json.load(sys.stdin)["install"][0]["metadata"]["version"]; sys.exit(not (v.endswith("+cpu") or sys.platform == "darwin"))' 2>/dev/null \
	      && $(PIP) install --editable '.[torch]' \
	      || echo "no CPU build of torch here: the tests against transformers are skipped (TORCH=1 installs what there is)" ;; \
	  1) $(PIP) install --editable '.[torch]' ;; \
	esac
	@touch $@

clean:
	@rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist
