# make train    set up what is needed, then train on this machine
# make test     set up what is needed, then run the tests
# CONFIG=file.yaml and SET='section.key=value ...' choose and change the run; PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/digits.yaml
SET ?=
RUN ?=
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train check render submit status logs cancel test lint bench clean

train: $(VENV)/.train
	@$(BIN)/trainer run "$(CONFIG)" $(SET)

check render submit: $(VENV)/.train
	@$(BIN)/trainer $@ "$(CONFIG)" $(if $(NODES),resources.nodes=$(NODES)) $(if $(GPUS),resources.gpus_per_node=$(GPUS)) $(SET)

status logs cancel: $(VENV)/.train
	@$(BIN)/trainer $@ $(if $(FOLLOW),--follow) $(if $(RUN),"$(RUN)")

test: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck $$(git ls-files '*.sh' '*.sbatch' .ci/run)

bench: $(VENV)/.train
	$(BIN)/python -m bench.loop

# The tested versions of everything, a few GB with CUDA, once.
$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"error: PYTHON=$(PYTHON): is {v[0]}.{v[1]}; needs 3.10 or newer, as in make PYTHON=python3.12" if v < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): PyTorch and the rest, some minutes, once"
	@$(BIN)/pip install -q -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "setting up $(VENV): the test tools, once"
	@$(BIN)/pip install -q -c constraints.txt -e '.[train,slurm,test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) dist build
