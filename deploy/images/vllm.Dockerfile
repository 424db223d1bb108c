# vLLM and a sidecar that supervises it, in one image: for machines that run one container (RunPod, Salad), and for plain VMs.
#
#   docker build -f deploy/images/vllm.Dockerfile -t spillway-vllm:0.2.0 .      (from the repository's root)
#
# The pool's `engine.exec` starts vLLM; docs/deploy/ has complete configurations. The sidecar has a separate environment, so that
# its packages cannot conflict with vLLM's. It adds 135 MB.
FROM vllm/vllm-openai:v0.32.0
LABEL org.opencontainers.image.title="Spillway side-car with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-deps uv==0.13.9 \
    && ln -s /opt/uv/bin/uv /usr/local/bin/uv

# Dependencies rarely change and come first, so that a source change reuses this layer. uv checks each file against its
# hash in uv.lock.
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    UV_PROJECT_ENVIRONMENT=/opt/spillway uv sync --frozen --only-group sidecar

COPY . .
RUN --mount=type=cache,target=/root/.cache/uv \
    UV_PROJECT_ENVIRONMENT=/tmp/build uv sync --frozen --only-group build \
    && uv build --wheel --no-build-isolation --offline --python /tmp/build/bin/python --out-dir /tmp/wheels \
    && uv pip install --offline --no-deps --python /opt/spillway /tmp/wheels/*.whl \
    && rm -r /tmp/build /tmp/wheels

# A number, not a name: Kubernetes' runAsNonRoot can check only numbers.
RUN groupadd --gid 10001 spillway \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/spillway --shell /usr/sbin/nologin spillway \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/spillway \
    && install --directory --owner 10001 --group 10001 --mode 0755 /models \
    && install --directory --mode 0755 /etc/spillway

# After vLLM's programs on PATH, which keep their Python. vLLM's caches are in the home folder.
ENV PATH=$PATH:/opt/spillway/bin HOME=/var/lib/spillway PYTHONUNBUFFERED=1

WORKDIR /etc/spillway
USER 10001:10001

# The worker writes this file when vLLM serves the model, which takes minutes, and exits if vLLM cannot be restarted.
HEALTHCHECK --interval=10s --timeout=3s --start-period=900s --retries=3 CMD ["test", "-f", "/tmp/ready"]

# The process handles SIGTERM (drain, stop vLLM, exit) as process 1. With the exec form, it receives
# signals directly.
# Last, so that a new commit reuses all other layers.
ARG REVISION=unknown
LABEL org.opencontainers.image.version="0.2.0" org.opencontainers.image.revision=$REVISION
ENTRYPOINT ["spillway"]
CMD ["worker", "--config", "/etc/spillway/spillway.toml", "--pool", "vllm", "--ready-file", "/tmp/ready"]
