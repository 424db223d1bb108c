# A worker without an engine of its own: it stands beside an inference server (a side-car), or asks a hosted API. No torch,
# no compiler, no model.
#
#   docker build -f deploy/images/sidecar.Dockerfile -t spillway-sidecar:0.1.0 .      (from the repository's root)
#
# Give it the queue, the server's address and the model's tokenizer; docs/engines/ has whole examples:
#
#   docker run --detach --restart unless-stopped --stop-timeout 45 --network container:vllm \
#     --volume /models/llama-8b:/model:ro --env SPILLWAY_NATS_URL=tls://spillway:PASSWORD@queue:4222 \
#     spillway-sidecar:0.1.0 worker --pool runpod --model llama-8b --tokenizer /model --engine-url http://127.0.0.1:8000
#
# Base images are pinned by version tag. For builds that are the same bit by bit, append the digest that
# `docker buildx imagetools inspect python:3.11-slim-bookworm` prints.

FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src

# The virtual environment gets no pip of its own: nothing is installed into a running container.
RUN python -m venv --without-pip /opt/venv

# The dependencies change seldom and come first, so that a change of the source reuses this layer.
COPY requirements/sidecar.txt requirements/build.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install --require-hashes --no-deps -r requirements/sidecar.txt \
    && pip install --require-hashes --no-deps -r requirements/build.txt

COPY pyproject.toml README.md LICENSE ./
COPY accounts accounts
COPY batches batches
COPY console console
COPY db db
COPY engine engine
COPY fleet fleet
COPY gateway gateway
COPY idempotency idempotency
COPY ledger ledger
COPY migrations migrations
COPY pool_worker pool_worker
COPY protocol protocol
COPY quotas quotas
COPY spillway spillway
COPY response_store response_store
COPY surfaces surfaces
COPY tokens tokens
COPY training training
COPY web web
COPY webhooks webhooks
RUN pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheels . \
    && pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl


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

# A worker listens on no port. It writes this file once it serves its model, and exits if its server is lost. Waiting for a
# server that loads for minutes is no fault: the start period is that of engine.ready_s.
HEALTHCHECK --interval=10s --timeout=3s --start-period=900s --retries=3 CMD ["test", "-f", "/tmp/ready"]

# No tini: the process handles SIGTERM (drain, then exit) itself, also as process 1, and starts no children here. The exec
# form keeps a shell from standing between it and the signal.
ENTRYPOINT ["spillway"]
CMD ["worker", "--config", "/etc/spillway/spillway.toml", "--pool", "sidecar", "--ready-file", "/tmp/ready"]
