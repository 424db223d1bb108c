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
# More workers and gateways are services of the files in COMPOSE_FILE. Their names begin with "worker" and "gateway".
services=$(docker compose config --services)
workers=$(echo "$services" | grep '^worker')
gateways=$(echo "$services" | grep '^gateway')
for service in ledger $workers $gateways; do
  compose up --detach --no-build --force-recreate --wait "$service"
done
compose up --detach --no-build --wait
