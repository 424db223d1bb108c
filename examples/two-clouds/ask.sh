#!/usr/bin/env bash
# Asks one question, prints the answer as it streams, then the pool that gave it: ./ask.sh [QUESTION]
set -euo pipefail

curl -sSNi "${SPILLWAY_BASE_URL:-http://127.0.0.1:8000}/v1/chat/completions" \
  -H "Authorization: Bearer ${SPILLWAY_API_KEY:-$(cat key)}" -H 'Content-Type: application/json' \
  -d '{"model": "llama-8b", "stream": true, "messages": [{"role": "user", "content": "'"${1:-What is a spillway?}"'"}]}' |
  awk '
    { sub(/\r$/, "") }
    /^x-spillway-(pool|tier): / { from = from " " $2 }
    /"error":/ { print }
    sub(/.*"delta":[{]"content":"/, "") { sub(/".*/, ""); printf "%s", $0; fflush() }
    END { printf "\nfrom:%s\n", from }'
