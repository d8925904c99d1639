# make train    set up what is needed, then train on this machine
# make test     set up what is needed, then run the tests
# make submit NODES=2 GPUS=8     send a run to Slurm (GPUS is per node); then make status, make logs FOLLOW=1, make cancel
# make image    builds the container image; make smoke runs two of them as two nodes
# CONFIG=file.yaml and SET='section.key=value ...' choose and change the run; PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/digits.yaml
SITE ?= slurm/site.yaml
SET ?=
BACKEND ?=
RUN ?=
BIN := $(VENV)/bin
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 iptables gcc libc6-dev libslurm-dev \
  slurm-wlm-basic-plugins-dev
PEERS := accelerate==1.16.0 lightning==2.6.6 matplotlib simplejpeg
DOCKER_PACKAGES := docker.io slirp4netns mmdebstrap iproute2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train check render submit rollcall apply status logs cancel image smoke smoke-without-engine sbom slurm-up slurm-down slurm-packages \
  docker-packages test lint bench clean

train: $(VENV)/.train
	@$(BIN)/python -m trainer run "$(CONFIG)" $(SET)

# make rollcall NODES=2: who is there, who differs, which way is slow; trains nothing.
check render submit rollcall: $(VENV)/.train
	@$(BIN)/python -m trainer $@ "$(SITE)" "$(CONFIG)" $(if $(BACKEND),backend=$(BACKEND)) $(if $(NODES),resources.nodes=$(NODES)) $(if $(GPUS),resources.gpus_per_node=$(GPUS)) $(SET)

# On Kubernetes: make render BACKEND=kubernetes | kubectl apply -f -, or at once:
apply: $(VENV)/.train
	@$(MAKE) --no-print-directory submit BACKEND=kubernetes

status logs cancel: $(VENV)/.train
	@$(BIN)/python -m trainer $@ $(if $(FOLLOW),--follow) $(if $(RUN),"$(RUN)")

# BASE_IMAGE=... CUDA_VERSION=... choose another base (CUDA_VERSION=none: one for the CPU), IMAGE=... another name.
image:
	docker compose build --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
	  --build-arg KIT_VERSION="$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' trainer/__init__.py)" node0
	@image=$$(docker compose config --images node0) && docker history --format 'table {{.Size}}\t{{.CreatedBy}}' "$$image" && \
	  docker image inspect --format "$$image: {{.Size}} bytes in {{len .RootFS.Layers}} layers, user {{.Config.User}}" "$$image" && \
	  docker run --rm --entrypoint sh "$$image" -c 'trainer --version; python3 --version; cat /opt/ddp-job-kit/torch'

# Two containers learn the digits; exit code 0 if they did. Leaves nothing behind.
smoke:
	@if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then \
	  docker compose up --abort-on-container-failure; code=$$?; \
	  docker compose ps --all --format '{{.Service}} ended with {{.ExitCode}}'; docker compose down --volumes; exit $$code; \
	else $(MAKE) --no-print-directory smoke-without-engine; fi

smoke-without-engine: $(VENV)/.train
	@echo "no container engine with compose answers here: two nodes run as plain processes instead, and the image is NOT tested"
	@$(BIN)/python -m trainer run configs/digits.yaml resources.nodes=2 resources.ranks_per_node=1 $(SET)

# What Python packages the image holds, as a CycloneDX document.
sbom: $(VENV)/.train
	@$(BIN)/python -m pip install -q cyclonedx-bom
	docker run --rm --entrypoint python3 "$$(docker compose config --images node0)" -m pip list --format=freeze | \
	  $(BIN)/cyclonedx-py requirements --output-file sbom.cdx.json -

# A Slurm cluster of two nodes on this machine (Debian or Ubuntu, root), to try job files before they meet a queue.
slurm-up: $(VENV)/.test slurm-packages
	@$(BIN)/python -m tests.lab.slurm up

slurm-down: $(VENV)/.test
	@$(BIN)/python -m tests.lab.slurm down

slurm-packages:
	@dpkg -s $(SLURM_PACKAGES) >/dev/null 2>&1 || (apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null)

docker-packages:
	@dpkg -s $(DOCKER_PACKAGES) >/dev/null 2>&1 || (apt-get update -qq && apt-get install -y -qq --no-install-recommends $(DOCKER_PACKAGES) >/dev/null)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/shellcheck $$(git ls-files '*.sh' '*.sbatch' .ci/run)
	$(BIN)/hadolint Dockerfile

bench: $(VENV)-bench/.made
	$(VENV)-bench/bin/python -m bench

# Peers live in an environment of their own, which sees the kit's.
$(VENV)-bench/.made: $(VENV)/.train
	$(PYTHON) -m venv "$(VENV)-bench"
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$("$(VENV)-bench/bin/python" -c 'import site; print(site.getsitepackages()[0])')/kit.pth"
	"$(VENV)-bench/bin/python" -m pip install -q -c constraints.txt $(PEERS)
	@touch "$@"

# The tested versions of everything, a few GB with CUDA, once.
$(VENV)/.train: pyproject.toml constraints.txt hatch_build.py trainer/train/pixels.c
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"error: PYTHON=$(PYTHON): is {v[0]}.{v[1]}; needs 3.10 or newer, as in make PYTHON=python3.12" if v < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): PyTorch and the rest, some minutes, once"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "setting up $(VENV): the test tools, once"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,slurm,test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) dist build
