# vLLM and a side-car that owns its life, in one image: for machines that run one container (RunPod, Salad), and for plain VMs.
#
#   docker build -f deploy/images/vllm.Dockerfile -t spillway-vllm:0.2.0 .      (from the repository's root)
#
# The pool's `engine.exec` starts vLLM: docs/deploy/ has whole configurations. The side-car has an environment of its own, so that
# neither's packages disturb the other's: 135 MB beside vLLM's gigabytes.
FROM vllm/vllm-openai:v0.32.0
LABEL org.opencontainers.image.title="Spillway side-car with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-deps uv==0.13.9 \
    && ln -s /opt/uv/bin/uv /usr/local/bin/uv

# The dependencies change seldom and come first, so that a change of the source reuses this layer. uv checks each file by its
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

# Behind vLLM's own programs, which keep their Python. What vLLM compiles and caches lies in the home folder.
ENV PATH=$PATH:/opt/spillway/bin HOME=/var/lib/spillway PYTHONUNBUFFERED=1

WORKDIR /etc/spillway
USER 10001:10001

# It writes this file once vLLM serves the model, which takes minutes, and exits if vLLM is lost for good.
HEALTHCHECK --interval=10s --timeout=3s --start-period=900s --retries=3 CMD ["test", "-f", "/tmp/ready"]

# The process handles SIGTERM (drain, end vLLM, exit) itself, also as process 1. The exec form keeps a
# shell from standing between it and the signal.
# Last, so that a new commit reuses all other layers.
ARG REVISION=unknown
LABEL org.opencontainers.image.version="0.2.0" org.opencontainers.image.revision=$REVISION
ENTRYPOINT ["spillway"]
CMD ["worker", "--config", "/etc/spillway/spillway.toml", "--pool", "vllm", "--ready-file", "/tmp/ready"]
