# Image of the gateway, the ledger writer and `spillway db upgrade`, without torch.
#
#   docker build -f deploy/images/gateway.Dockerfile -t spillway-gateway:0.2.0 .      (from the repository's root)
#
# For the fleet controller, with the packages of its EC2 and Kubernetes drivers:
#
#   docker build -f deploy/images/gateway.Dockerfile -t spillway-fleet:0.2.0 \
#     --build-arg EXTRAS="--extra otel --extra aws --extra kubernetes" .
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
ARG EXTRAS="--extra otel --extra s3"
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache/uv \
    UV_PROJECT_ENVIRONMENT=/opt/build uv sync --frozen --only-group build \
    && UV_PROJECT_ENVIRONMENT=/opt/venv uv sync --frozen --no-install-project $EXTRAS

COPY . .
RUN uv build --wheel --no-build-isolation --offline --python /opt/build/bin/python --out-dir /wheels \
    && uv pip install --no-cache --offline --no-deps --python /opt/venv /wheels/*.whl


FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="Spillway gateway" \
      org.opencontainers.image.licenses="Apache-2.0"

# A number, not a name: Kubernetes' runAsNonRoot can check only numbers.
RUN groupadd --gid 10001 spillway \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/spillway --shell /usr/sbin/nologin spillway \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/spillway /var/lib/spillway/files /var/lib/spillway/spool \
    && install --directory --mode 0755 /etc/spillway

COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# Commands without --config read ./spillway.toml, so `docker exec … spillway keys create NAME` finds it here.
WORKDIR /etc/spillway
USER 10001:10001
EXPOSE 8000

# Liveness, not readiness: a gateway that waits for NATS must not be killed. Ledger writers override this check.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/livez', timeout=2)"]

# No tini: the process handles SIGTERM and SIGINT as process 1 and has no children to
# reap. With the exec form, it receives signals directly.
# Last, so that a new commit reuses all other layers.
ARG REVISION=unknown
LABEL org.opencontainers.image.version="0.2.0" org.opencontainers.image.revision=$REVISION
ENTRYPOINT ["spillway"]
CMD ["gateway", "--config", "/etc/spillway/spillway.toml"]
