# A worker with Spillway's own engine and the demo model.
#
#   docker build -f deploy/images/worker.Dockerfile -t spillway-worker:0.2.0 .        (CPU; from the repository's root)
#
# For NVIDIA GPUs take torch from a CUDA index, together with the CUDA libraries it depends on (several GB):
#
#   docker build -f deploy/images/worker.Dockerfile -t spillway-worker:0.2.0-cuda \
#     --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130 --build-arg TORCH_PIP_OPTIONS= .
#
# and run it with `--gpus all`. torch's wheels contain CUDA; the host needs only the driver and NVIDIA's
# container toolkit, so the base image stays the slim one. The engine's kernels are compiled for
# the machine that they run on, which takes a C compiler: for a CPU when a worker starts, for a GPU (by Triton, which
# keeps them in the data folder) when they are first needed. Base images are pinned by version tag. For builds that are the same
# bit by bit, append the digest that `docker buildx imagetools inspect python:3.11-slim-bookworm` prints.

FROM python:3.11-slim-bookworm AS build
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps uv==0.13.9

# Dependencies rarely change and come first, so that a source change reuses this layer. uv checks each file against its
# hash in uv.lock. The virtual environment has no pip: nothing is installed into a running container.
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    UV_PROJECT_ENVIRONMENT=/opt/build uv sync --frozen --only-group build \
    && UV_PROJECT_ENVIRONMENT=/opt/venv uv sync --frozen --no-install-project --extra worker --extra otel --group torch

# The only dependency outside the lock: its CPU and CUDA builds share a version (docs/adr/0004-torch-outside-the-lock.md).
# Its dependencies are in the lock, hence --no-deps. The linter mistakes the unquoted options for packages
# without a version.
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG TORCH_PIP_OPTIONS=--no-deps
# hadolint ignore=DL3013,SC2086
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install --index-url "$TORCH_INDEX_URL" $TORCH_PIP_OPTIONS "torch==$TORCH_VERSION"

COPY . .
RUN uv build --wheel --no-build-isolation --offline --python /opt/build/bin/python --out-dir /wheels \
    && uv pip install --no-cache --offline --no-deps --python /opt/venv /wheels/*.whl


FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="Spillway worker" \
      org.opencontainers.image.licenses="Apache-2.0"

# A number, not a name: Kubernetes' runAsNonRoot can check only numbers.
RUN groupadd --gid 10001 spillway \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/spillway --shell /usr/sbin/nologin spillway \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/spillway \
    && install --directory --mode 0755 /etc/spillway

ARG APT_PACKAGES="gcc libc6-dev"
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$APT_PACKAGES" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends $APT_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi

COPY --from=build /opt/venv /opt/venv
# Set the modes: under umask 077 only the checkout's owner can read it.
COPY --chmod=0755 models/spillway-demo /opt/spillway/models/spillway-demo
# Models from a hub are cached in the data folder, so that a volume there saves downloads.
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/var/lib/spillway/huggingface

WORKDIR /etc/spillway
USER 10001:10001

# A worker listens on no port. It writes this file when it serves its model, and exits if its engine dies.
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 CMD ["test", "-f", "/tmp/ready"]

# No tini: the process handles SIGTERM (drain, then exit) as process 1 and has no children to
# reap. With the exec form, it receives signals directly.
# Last, so that a new commit reuses all other layers.
ARG REVISION=unknown
LABEL org.opencontainers.image.version="0.2.0" org.opencontainers.image.revision=$REVISION
ENTRYPOINT ["spillway"]
CMD ["worker", "--config", "/etc/spillway/spillway.toml", "--pool", "demo", "--ready-file", "/tmp/ready"]
