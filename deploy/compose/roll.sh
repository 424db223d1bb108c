#!/bin/sh
# Apply the current images, docker-compose.yml, .env and spillway.toml: one service after another, so that no request fails.
# Use it after `docker compose build`, and after each edit of deploy/compose/spillway.toml, which Compose does not notice.
set -eu
cd "$(dirname "$0")/../.."

compose() {
  echo "+ docker compose $*" >&2
  docker compose "$@"
}

compose up --detach --no-build --wait nats postgres
compose run --rm migrate
# No --no-deps: Compose before 2.30 would remember the service as a different one and recreate it at the next plain `up`.
# All workers and gateways that run: their names begin with "worker" and "gateway". What is new comes last, because the worker
# of a new model is healthy only once a gateway knows the model.
running=$(docker compose ps --services)
for kind in ledger worker gateway; do
  for service in $(echo "$running" | grep "^$kind"); do
    compose up --detach --no-build --force-recreate --wait "$service"
  done
done
compose up --detach --no-build --wait
