#!/bin/sh
# Write .env for docker-compose.yml: env.example with a random 256-bit secret for each empty variable.
set -eu
cd "$(dirname "$0")"
target="${1:-../../.env}"

if [ -e "$target" ]; then
  echo "$target already exists and its secrets are in use: not overwritten." >&2
  exit 1
fi

umask 077
draft="$target.draft"
while IFS= read -r line; do
  case "$line" in
    '#'*) ;;
    *=) line="$line$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" ;;
  esac
  printf '%s\n' "$line"
done <env.example >"$draft"
mv "$draft" "$target"
# Containers read these files as unprivileged users. A checkout under umask 077 would deny them.
chmod a+r spillway.toml ../haproxy/haproxy.cfg
chmod -R a+rX ../prometheus ../grafana
echo "Wrote $target. Keep a copy with your backups: without it, passwords and API keys are lost."
