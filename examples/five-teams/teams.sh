#!/usr/bin/env bash
# Creates five teams, each with one key in keys/TEAM. Run it once.
set -euo pipefail
umask 077
mkdir -p keys

team() {
  echo "$1: ${*:2}"
  spillway teams create "$@" >/dev/null
  spillway keys create "$1-app" --team "$1" >"keys/$1"
}

team search --budget "200 USD/month" --weight 3         # three times the share of the workers
team support --budget "100 USD/month" --rpm 600
team research --budget "50 USD/month" --tpm 100000
team nightly --budget "50 USD/month" --batch-only       # gets what the other teams leave
team interns --budget "0.002 USD/day"                   # enough for one question
