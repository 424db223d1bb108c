#!/usr/bin/env bash
# The program of a machine that SkyPilot starts: `worker.sh setup` once, then `worker.sh run`. The task files in this folder copy it,
# spillway.toml, the lock file and the wheel to the machine's home folder.
set -euo pipefail
: "${MODEL:?the model on the Hugging Face hub}" "${MODEL_FOLDER:?where it goes, as spillway.toml has it}"

# SkyPilot's Python may be too old for Spillway; uv installs one.
export PATH="$HOME/.local/bin:$PATH"

case "${1:?usage: worker.sh setup|run}" in
  setup)
    curl --location --silent --show-error --fail https://astral.sh/uv/0.13.9/install.sh | sh
    uv venv --allow-existing --python 3.12 "$HOME/vllm"
    uv pip install --python "$HOME/vllm" 'vllm==0.32.0'
    # The sidecar has a separate environment, so that its packages cannot conflict with the server's.
    UV_PROJECT_ENVIRONMENT="$HOME/spillway" uv sync --project "$HOME/lock" --frozen --inexact --python 3.12 --only-group sidecar
    uv pip install --python "$HOME/spillway" --no-deps "$HOME"/spillway_gateway-*.whl
    as_root=()
    if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
    "${as_root[@]}" install --directory --owner "$(id -u)" --group "$(id -g)" "$MODEL_FOLDER"
    "$HOME/vllm/bin/hf" download "$MODEL" --local-dir "$MODEL_FOLDER"
    ;;
  run)
    : "${POOL:?}" "${SPILLWAY_NATS__URLS:?pass it with --secret}"
    export PATH="$HOME/vllm/bin:$PATH"
    exec "$HOME/spillway/bin/spillway" worker --config "$HOME/spillway.toml" --pool "$POOL"
    ;;
  *)
    echo "usage: worker.sh setup|run" >&2
    exit 2
    ;;
esac
