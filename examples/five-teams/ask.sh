#!/usr/bin/env bash
# Asks the same question twice with each team's key, and prints the answer's status and the reason of a refusal.
set -euo pipefail

ask() {
  curl -sS -w '\n%{http_code}' "${SPILLWAY_BASE_URL:-http://127.0.0.1:8000}/v1/chat/completions" \
    -H "Authorization: Bearer $(cat "$1")" -H 'Content-Type: application/json' \
    -d '{"model": "spillway-demo", "messages": [{"role": "user", "content": "What is Spillway?"}]}'
}

for key in keys/*; do
  for _ in first second; do
    # A 503 is for now only: the official SDKs retry it, curl does not.
    until answer=$(ask "$key") && [[ $answer != *503 ]]; do sleep 1; done
    reason=$(sed -n 's/.*"error":{"message":"\([^"]*\)".*/\1/p' <<<"$answer")
    echo "${key#keys/}: ${answer##*$'\n'} $reason"
  done
done
