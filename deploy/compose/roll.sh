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
# A worker of another pool is a service of docker-compose.override.yml whose name begins with "worker".
workers=$(docker compose config --services | grep '^worker')
for service in ledger $workers gateway-1 gateway-2; do
  compose up --detach --no-build --force-recreate --wait "$service"
done
compose up --detach --no-build --wait
