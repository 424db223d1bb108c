#!/bin/sh
# Apply the current images, docker-compose.yml, .env and spillway.toml to one service after another, so that no request fails.
# Run it after `docker compose build`, and after each edit of deploy/compose/spillway.toml: Compose does not detect such edits.
set -eu
cd "$(dirname "$0")/../.."

compose() {
  echo "+ docker compose $*" >&2
  docker compose "$@"
}

compose up --detach --no-build --wait nats postgres
compose run --rm migrate
# Without --no-deps: with it, Compose before 2.30 recreates the service again at the next plain `up`.
# Recreate all running workers and gateways: their names start with "worker" and "gateway". Start new services last, because
# the worker of a new model becomes healthy only after a gateway knows the model.
running=$(docker compose ps --services)
for kind in ledger worker gateway; do
  for service in $(echo "$running" | grep "^$kind"); do
    compose up --detach --no-build --force-recreate --wait "$service"
  done
done
compose up --detach --no-build --wait
