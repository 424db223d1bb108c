# A worker without Spillway's engine: a sidecar of an inference server, or a client of a hosted API. No torch,
# no compiler, no model.
#
#   docker build -f deploy/images/sidecar.Dockerfile -t spillway-sidecar:0.2.0 .      (from the repository's root)
#
# Pass the queue, the server's address and the model's tokenizer; docs/engines/ has complete examples:
#
#   docker run --detach --restart unless-stopped --stop-timeout 45 --network container:vllm \
#     --volume /models/llama-8b:/model:ro --env SPILLWAY_NATS_URL=tls://spillway:PASSWORD@queue:4222 \
#     spillway-sidecar:0.2.0 worker --pool runpod --model llama-8b --tokenizer /model --engine-url http://127.0.0.1:8000
#
# Base images are pinned by version tag. For reproducible builds, append the digest that
# `docker buildx imagetools inspect python:3.11-slim-bookworm` prints.

FROM python:3.11-slim-bookworm AS build
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps uv==0.13.9

# Dependencies rarely change and come first, so that a source change reuses this layer. uv checks each file against its
# hash in uv.lock. The virtual environment has no pip: nothing is installed into a running container.
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    UV_PROJECT_ENVIRONMENT=/opt/build uv sync --frozen --only-group build \
    && UV_PROJECT_ENVIRONMENT=/opt/venv uv sync --frozen --only-group sidecar

COPY . .
RUN uv build --wheel --no-build-isolation --offline --python /opt/build/bin/python --out-dir /wheels \
    && uv pip install --no-cache --offline --no-deps --python /opt/venv /wheels/*.whl


FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="Spillway side-car" \
      org.opencontainers.image.licenses="Apache-2.0"

# A number, not a name: Kubernetes' runAsNonRoot can check only numbers.
RUN groupadd --gid 10001 spillway \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/spillway --shell /usr/sbin/nologin spillway \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/spillway \
    && install --directory --mode 0755 /etc/spillway

COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

WORKDIR /etc/spillway
USER 10001:10001

# A worker listens on no port. It writes this file when it serves its model, and exits if its server is lost. A server may
# load for minutes, so the start period is that of engine.ready_s.
HEALTHCHECK --interval=10s --timeout=3s --start-period=900s --retries=3 CMD ["test", "-f", "/tmp/ready"]

# No tini: the process handles SIGTERM (drain, then exit) as process 1 and starts no children. With the exec
# form, it receives signals directly.
# Last, so that a new commit reuses all other layers.
ARG REVISION=unknown
LABEL org.opencontainers.image.version="0.2.0" org.opencontainers.image.revision=$REVISION
ENTRYPOINT ["spillway"]
CMD ["worker", "--config", "/etc/spillway/spillway.toml", "--pool", "sidecar", "--ready-file", "/tmp/ready"]
