# The kit on NVIDIA's PyTorch image.   make image      or: docker build --tag ddp-job-kit .
#
# Another base:  --build-arg BASE_IMAGE=... --build-arg CUDA_VERSION=12.8   (none: a base whose torch is made for the CPU)
# Needs no BuildKit. trainer/image.yaml is the table of what is pinned; tests/test_image.py holds this file to it.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.09-py3
ARG CUDA_VERSION=13.4
# After FROM the base's own variable of that name would win.
ARG WANTED_CUDA=${CUDA_VERSION}

FROM ${BASE_IMAGE}
ARG WANTED_CUDA
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]

# What the base promises, before anything is put on it: torch's version, and the CUDA version that it is made for.
COPY docker/torch_version.py /opt/ddp-job-kit/
RUN python3 /opt/ddp-job-kit/torch_version.py > /opt/ddp-job-kit/torch && \
    { grep -qx "cuda ${WANTED_CUDA}" /opt/ddp-job-kit/torch || \
      { echo "error: CUDA_VERSION=${WANTED_CUDA}: the base has $(tr '\n' ' ' < /opt/ddp-job-kit/torch); correct BASE_IMAGE or CUDA_VERSION" >&2; exit 1; }; }

# Dependencies change seldom, the kit often. The base's constraints for pip hold (PIP_CONSTRAINT).
COPY docker/requirements.py pyproject.toml /opt/ddp-job-kit/
RUN python3 /opt/ddp-job-kit/requirements.py > /opt/ddp-job-kit/requirements.txt && \
    python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore --requirement /opt/ddp-job-kit/requirements.txt

# Nobody but root can write outside /workspace/runs and /tmp; any uid can run it, also with a read-only root.
ARG UID=10001
ARG GID=10001
RUN { getent group "${GID}" || groupadd --gid "${GID}" trainer; } && \
    { getent passwd "${UID}" || useradd --uid "${UID}" --gid "${GID}" --no-create-home --home-dir /tmp trainer; } && \
    install --directory --mode=1777 /workspace/runs && \
    find / -xdev ! -path '/proc/*' ! -path '/sys/*' \( -type f -o -type d ! -perm -1000 \) \( -perm -0002 -o ! -user 0 -o -perm -0020 ! -group 0 \) \
      -exec chown root:root {} + -exec chmod o-w {} +
ENV HOME=/tmp USER=trainer PYTHONUNBUFFERED=1 TRAINER_HEALTH_FILE=/tmp/trainer.health
WORKDIR /workspace

COPY . /opt/ddp-job-kit/source
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore --no-deps /opt/ddp-job-kit/source && \
    cp --recursive /opt/ddp-job-kit/source/configs /workspace/ && rm --recursive --force /opt/ddp-job-kit/source && \
    python3 /opt/ddp-job-kit/torch_version.py | diff /opt/ddp-job-kit/torch - && \
    trainer check configs/digits.yaml

ARG BASE_IMAGE
ARG KIT_VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ddp-job-kit" \
      org.opencontainers.image.description="Takes a PyTorch training job from one process to many nodes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${KIT_VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      ddp-job-kit.cuda="${WANTED_CUDA}"

# A node writes there at least every second or so while it waits or watches its ranks.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["/bin/sh", "-c", "test $(( $(date +%s) - $(stat --format=%Y $TRAINER_HEALTH_FILE) )) -lt 20"]
USER ${UID}:${GID}
# No ENTRYPOINT: the base's own stays. It sets up forward compatibility of CUDA and then puts the command in its place.
CMD ["trainer", "--help"]
