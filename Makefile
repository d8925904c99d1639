# make train    set up what is needed, then train on this machine
# make test     set up what is needed, then run the tests
# make submit NODES=2 GPUS=8     send a run to Slurm (GPUS is per node); then make status, make logs FOLLOW=1, make cancel
# CONFIG=file.yaml and SET='section.key=value ...' choose and change the run; PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/digits.yaml
SITE ?= slurm/site.yaml
SET ?=
RUN ?=
BIN := $(VENV)/bin
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 iptables gcc libc6-dev libslurm-dev \
  slurm-wlm-basic-plugins-dev
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train check render submit status logs cancel slurm-up slurm-down slurm-packages test lint bench clean

train: $(VENV)/.train
	@$(BIN)/trainer run "$(CONFIG)" $(SET)

check render submit: $(VENV)/.train
	@$(BIN)/trainer $@ "$(SITE)" "$(CONFIG)" $(if $(NODES),resources.nodes=$(NODES)) $(if $(GPUS),resources.gpus_per_node=$(GPUS)) $(SET)

status logs cancel: $(VENV)/.train
	@$(BIN)/trainer $@ $(if $(FOLLOW),--follow) $(if $(RUN),"$(RUN)")

# A Slurm cluster of two nodes on this machine (Debian or Ubuntu, root), to try job files before they meet a queue.
slurm-up: $(VENV)/.test slurm-packages
	@$(BIN)/python -m tests.lab.slurm up

slurm-down: $(VENV)/.test
	@$(BIN)/python -m tests.lab.slurm down

slurm-packages:
	@dpkg -s $(SLURM_PACKAGES) >/dev/null 2>&1 || (apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null)

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
