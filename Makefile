# make demo    runs the first notebook on two ranks, leaves it and an HTML page in build/
# make test    lint, types, tests, then every notebook against its stored outputs
# make check   lint, types, what needs no ranks and one short session: before each commit
# make test TORCH=2.15.0  the same with another torch; later `make test` tries that one too, in short
# make notebooks  the notebooks alone; GPU=1 runs them on the GPUs that there are
# make faults  every fault on 2 and 4 ranks, and the table of docs/reliability.md from it
# make parity  every strategy, option and switch beside one process, into docs/parity.md
# make accuracy  what plans predict beside what ranks and others measure, into docs/accuracy.md
# make test-browser  every test that drives JupyterLab in a browser; its pictures in build/panel
# make cluster  every test on several hosts, as root; make cluster-shell is a shell on one of them
# make lab     JupyterLab with the notebooks
# make docs    the site: pages, lessons as they are stored, every magic's help; build/site/html
# make store   runs the notebooks and stores their outputs, for `make test` to compare
# make gpu     all of it on this machine's GPUs, in ten minutes, into docs/gpu.md
# make wheels  what make gpu needs on a machine without a network, into wheels/
# make bench   what nbdist costs beside the same without it, into docs/benchmarks.md
# make lint    the style and format check alone
# make clean   removes everything that make has made
#
# Needs Python 3.11 or newer with venv (Debian: python3-venv) and make. The first run fills
# .venv, later ones reuse it. Another Python: make clean, then make demo PYTHON=python3.12.

PYTHON ?= python3

# TORCH=2.15.0 takes another torch than constraints.txt, in an environment of its own.
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
CONSTRAINTS := $(if $(TORCH),build/constraints-torch-$(TORCH).txt,constraints.txt)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
INSTALLED := $(VENV)/.installed
LAB_INSTALLED := $(VENV)/.installed-lab
DOCS_INSTALLED := $(VENV)/.installed-docs
DEMO := 01_first_steps

# The demo and the tests use no settings of the user's own and leave nothing in HOME.
SETTINGS := $(CURDIR)/build/settings
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export IPYTHONDIR = $(SETTINGS)/ipython
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export JUPYTER_CONFIG_DIR = $(SETTINGS)/jupyter/config
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export JUPYTER_DATA_DIR = $(SETTINGS)/jupyter/data
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export JUPYTER_RUNTIME_DIR = $(SETTINGS)/jupyter/runtime
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export MPLCONFIGDIR = $(SETTINGS)/matplotlib
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export HF_HOME = $(SETTINGS)/huggingface
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export HF_HUB_OFFLINE = 1
# Hundreds of processes import nbdist: none has to compile what another one has.
demo check unit faults parity accuracy test-browser cluster notebooks store bench: export PYTHONDONTWRITEBYTECODE =

# Stored outputs are those of two ranks on the CPU with one thread each, on any machine.
store: export NBDIST_TEST = 1
store $(if $(GPU),,notebooks): export CUDA_VISIBLE_DEVICES =
notebooks store: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test check lint types unit faults parity accuracy test-browser cluster cluster-shell notebooks store bench gpu wheels lab docs clean

help:
	@sed -n '1,18s/^# //p' Makefile

build/constraints-torch-$(TORCH).txt: constraints.txt
	@mkdir -p $(@D)
	@sed 's/^torch==.*/torch==$(TORCH)/' $< >$@

# torch comes first and alone: whatever asks for it later finds the pinned build in place.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "nbdist needs Python 3.11 or newer; $(PYTHON) is not. Use: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) cannot make environments. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV), once: about 1.8 GB and 2 to 4 minutes with a fast connection."
	@echo "Torch with CUDA is several GB more; constraints.txt says how to have the CPU's alone."
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 2: torch, the larger half"
	$(PIP) install --quiet -c $(CONSTRAINTS) torch hatchling
	@echo "2 of 2: nbdist with what it uses (Jupyter, Accelerate, matplotlib) and what its tests use"
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[test]'
	@touch $@

$(LAB_INSTALLED): $(INSTALLED)
	@echo "Installing JupyterLab, once: about 0.1 GB and half a minute."
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[test,lab]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	@echo "Installing Sphinx, once: about 0.1 GB and half a minute."
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[test,docs]'
	@touch $@

# IPython takes a temporary folder instead where the parent of its own does not exist. The list
# of fonts is made here because matplotlib complains in a cell's output when that takes long.
build/settings: | $(INSTALLED)
	@mkdir -p $@
	@MPLCONFIGDIR=$(SETTINGS)/matplotlib $(PY) -c 'import matplotlib.font_manager'

demo: $(INSTALLED) | build/settings
	@echo "Running notebooks/$(DEMO).ipynb on two ranks: about 40 seconds on 2 cores."
	$(PY) -m nbconvert --to notebook --execute \
	  --ExecutePreprocessor.kernel_name=python3 \
	  --ExecutePreprocessor.startup_timeout=120 --ExecutePreprocessor.timeout=600 \
	  --output-dir build --output $(DEMO).ipynb notebooks/$(DEMO).ipynb
	$(PY) -m nbconvert --to html --output-dir build build/$(DEMO).ipynb
	@echo "$(CURDIR)/build/$(DEMO).ipynb"
	@echo "$(CURDIR)/build/$(DEMO).html"

# Two files of tests or notebooks at a time where there are two cores, and the tests of a file, which
# share their ranks, one after the other. Three take a seventh less: `make test WORKERS=3`; one: WORKERS=.
WORKERS ?= $(shell test "$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 1)" -ge 2 && echo 2)
side_by_side = $(if $(1),-n $(1) --dist loadfile)

# The browser tests drive JupyterLab, so it comes along where there is a browser.
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

timed = began=$$(date +%s); $(MAKE) --no-print-directory $(1) || exit; times="$${times}$(1) $$(($$(date +%s) - began)) s, "

# Style and types are those of the pinned torch. mypy is one process for a minute, so it runs beside
# the first tests; what it says comes after them.
test: $(INSTALLED) $(if $(BROWSER),$(LAB_INSTALLED))
	@mkdir -p build; times=; \
	$(if $(TORCH),,$(call timed,lint); $(MAKE) --no-print-directory types >build/types.log 2>&1 & types=$$!;) \
	$(call timed,unit); \
	$(if $(TORCH),,wait $$types || { cat build/types.log; exit 1; };) \
	$(call timed,notebooks); \
	echo "Passed: $${times%, }$(if $(TORCH),, (types beside unit))."

# nbval is for notebooks: where JupyterLab is installed its import takes each process two seconds.
PYTEST = $(PY) -m pytest -p no:nbval

WITHOUT_RANKS := not ranks and not slow and not browser and not faults and not parity and not accuracy and not versions

check: lint types
	$(PYTEST) $(call side_by_side,2) -m "$(WITHOUT_RANKS)" tests
	$(PYTEST) -m "" -k "fsdp or switches" tests/front/test_short.py

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED)
	$(PY) -m mypy

unit: $(INSTALLED) $(if $(BROWSER),$(LAB_INSTALLED)) | build/settings
	$(PYTEST) $(call side_by_side,$(WORKERS)) --no-loadscope-reorder tests

# -m "" takes what `make test` leaves out as well. The table is made anew from a run that passed.
FAULTS := $(CURDIR)/build/faults.jsonl
FAULTY := tests/faults tests/hang/test_restart.py tests/cluster/test_controller.py \
  tests/front/test_loaders.py tests/front/test_failures.py

faults: export NBDIST_FAULTS_LOG = $(FAULTS)
faults: $(INSTALLED) | build/settings
	@rm -f $(FAULTS)
	$(PYTEST) -m "" $(FAULTY)
	$(PYTEST) -m faults tests $(addprefix --ignore=,$(FAULTY))
	$(PY) -m tests.faults.report $(FAULTS) docs/reliability.md

# Beside the tables, what else is left out of `make test` because a like case is in it.
PARITY := $(CURDIR)/build/parity.jsonl

parity: export NBDIST_PARITY_LOG = $(PARITY)
parity: $(INSTALLED) | build/settings
	@rm -f $(PARITY)
	$(PYTEST) -m "" tests/parity --deselect tests/parity/test_report.py::test_the_page_has_every_case
	$(PY) -m tests.parity.report $(PARITY) docs/parity.md
	$(PYTEST) -m "" tests/parity/test_report.py
	$(PYTEST) -m parity tests --ignore tests/parity

# The page is compared with the cases, and made anew from a run in which all were close.
ACCURACY := $(CURDIR)/build/accuracy.jsonl

accuracy: export NBDIST_ACCURACY_LOG = $(ACCURACY)
accuracy: $(INSTALLED) | build/settings
	@rm -f $(ACCURACY)
	$(PYTEST) -m "" tests/accuracy/test_accuracy.py
	$(PY) -m tests.accuracy.report $(ACCURACY) docs/accuracy.md
	$(PY) -m tests.accuracy.time_report docs/accuracy.md
	$(PY) -m tests.accuracy.published_memory docs/accuracy.md
	$(PYTEST) -m "" tests/accuracy/test_report.py tests/accuracy/test_times.py

# Without a browser pytest would skip all of it and succeed.
test-browser: $(LAB_INSTALLED) | build/settings
	@test -n "$(BROWSER)" || { echo "There is no browser: install Chromium or Chrome" \
	  "(on Debian: apt-get install chromium), then make test-browser again."; exit 1; }
	$(PYTEST) -m "" tests/browser

# Without root or a program pytest would skip all of it and succeed; this says what is missing.
cluster: $(INSTALLED) | build/settings
	$(PY) -m tests.support.hosts true
	$(PYTEST) -m "" tests/cluster/hosts
	$(PYTEST) -m more_hosts tests --ignore tests/cluster/hosts

cluster-shell: $(INSTALLED)
	@$(PY) -m tests.support.hosts

notebooks: $(INSTALLED) | build/settings
	$(PY) -m pytest $(call side_by_side,$(if $(GPU),,$(WORKERS))) --nbdist --timeout 480 notebooks

store: $(INSTALLED) | build/settings
	$(PY) -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.kernel_name=python3 --ExecutePreprocessor.record_timing=False \
	  --ExecutePreprocessor.coalesce_streams=True \
	  --ExecutePreprocessor.startup_timeout=120 --ExecutePreprocessor.timeout=600 notebooks/*.ipynb

bench: export OMP_NUM_THREADS = 1
bench: $(INSTALLED) | build/settings
	$(PY) -m benchmarks.run

# With wheels/ it runs beside the torch that PYTHON has, and needs no network. PARTS="faults probes"
# takes some parts alone; one command takes ten minutes at most.
WHEELS := $(wildcard wheels/*.whl)
GPU_VENV := $(if $(shell command -v nvidia-smi),$(if $(WHEELS),,$(INSTALLED)))

gpu: $(GPU_VENV)
	@$(if $(GPU_VENV),$(PY),$(PYTHON)) -m tests.gpu $(if $(WHEELS),--wheels wheels) $(PARTS)

GPU_PYTHON := 3.12
wheels:
	$(PYTHON) -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: \
	  --python-version $(GPU_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  --requirement tests/gpu/wheels.txt --dest wheels
	@du -sh wheels

docs: $(DOCS_INSTALLED)
	$(PY) docs/site/build.py build/site

lab: $(LAB_INSTALLED)
	$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

clean:
	rm -rf $(VENV) build dist wheels .mypy_cache .pytest_cache .ruff_cache
	find nbdist tests benchmarks notebooks profiles -type d \
	  '(' -name __pycache__ -o -name .ipynb_checkpoints ')' -prune -exec rm -rf {} +
