#!/usr/bin/env bash
# Prepare .venv for `run`, `unit` or `test`: find a Python and run scripts/setup.py.
set -euo pipefail
cd "$(dirname "$0")/.."

for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
  if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    exec "$name" scripts/setup.py "$@"
  fi
done
echo "Spillway needs Python 3.11 or newer. Install it, or set PYTHON to its path." >&2
exit 1
