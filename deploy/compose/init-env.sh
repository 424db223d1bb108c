#!/bin/sh
# Write .env for docker-compose.yml: env.example with a random secret of 256 bits behind every empty name.
set -eu
cd "$(dirname "$0")"
target="${1:-../../.env}"

if [ -e "$target" ]; then
  echo "$target is there already; its secrets are in use, so it stays as it is." >&2
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
# Containers read these as users without rights. Under umask 077 only the checkout's owner could.
chmod a+r spillway.toml ../haproxy/haproxy.cfg
chmod -R a+rX ../prometheus ../grafana
echo "Wrote $target. Keep a copy where backups live: the passwords and API keys depend on it."
