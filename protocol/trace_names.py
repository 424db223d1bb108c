"""The names of all attributes and events of Spillway's spans.

Those of HTTP, messaging and errors are stable or nearly so. OpenTelemetry's conventions for generative AI are in
"Development": their names are pinned only here, as of semantic conventions 1.44.
"""

from typing import Final

# --- generative AI ----------------------------------------------------------------------------------------------------
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TTFT_S: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

OPERATIONS: Final = {  # by endpoint; others keep their name
    "chat.completions": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}

# --- HTTP, messaging, errors ------------------------------------------------------------------------------------------
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION: Final = "messaging.operation.type"
ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE: Final = "service.instance.id"

# --- ours -------------------------------------------------------------------------------------------------------------
REQUEST_ID: Final = "spillway.request_id"  # as in the header x-request-id
OUTCOME: Final = "spillway.outcome"
ATTEMPT: Final = "spillway.attempt"
ATTEMPTS: Final = "spillway.attempts"
DELIVERIES: Final = "spillway.deliveries"  # above 1: the queue redelivered the attempt
RESUMED_TOKENS: Final = "spillway.resumed_tokens"
PREEMPTIONS: Final = "spillway.preemptions"
WORKER_ID: Final = "spillway.worker_id"
POOL: Final = "spillway.pool"
MACHINE_PROVIDER: Final = "spillway.provider"
REGION: Final = "spillway.region"
TIER: Final = "spillway.tier"
ERROR_CODE: Final = "spillway.error_code"
ATTEMPT_FAILED: Final = "attempt failed"  # an event
