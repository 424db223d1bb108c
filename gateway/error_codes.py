"""What each error code means and what its reader can do: the source of the pages and of OpenAPI's descriptions.

Messages say what happened to one request. Statuses, types and retries: ``gateway.api.errors``.
"""

from typing import Final, NamedTuple

MALFORMED_JSON: Final = "malformed_json"  # the anchor of the one error whose ``code`` is null, as OpenAI's is


class About(NamedTuple):
    """The meaning of a code."""

    cause: str
    advice: str


class Group(NamedTuple):
    """Codes of one kind."""

    title: str
    codes: dict[str, About]


_REQUEST: Final = {
    MALFORMED_JSON: About(
        "The body is not valid JSON.",
        "Fix the body; the message names the position. In the response, `code` is null, as in OpenAI's API.",
    ),
    "missing_required_parameter": About(
        "A required field is missing.",
        "Add the field that `param` names.",
    ),
    "invalid_type": About(
        "A field has a value of the wrong JSON type.",
        "Change the field that `param` names.",
    ),
    "invalid_value": About(
        "A field, header or query parameter has a value that is not allowed, or two of them contradict each other.",
        "Change the field that `param` names. The message says which values are allowed.",
    ),
    "precondition_failed": About(
        "`If-Match` names an older state of the key or team: it has changed since.",
        "Read the object again, then send the change with its new `ETag`.",
    ),
    "unknown_parameter": About(
        "`[gateway] strict_fields` is on, and the body has an unknown field that resembles a known one.",
        "Use the field that the message suggests, or remove the unknown one.",
    ),
    "unsupported_parameter": About(
        "Spillway does not support this field, or the model or its pools do not.",
        "Remove the field that `param` names. The API reference lists what is supported.",
    ),
    "unsupported_schema_keyword": About(
        "The JSON schema uses a keyword that cannot be enforced while the model generates.",
        "Remove the keyword. The operator can set `lenient_schemas` for the model: then the answer is checked after it"
        " is generated.",
    ),
    "grammar_too_complex": About(
        "The JSON schema, regular expression or grammar takes too long to compile or too much memory.",
        "Simplify it: fewer alternatives, smaller repeat counts, less nesting.",
    ),
    "context_length_exceeded": About(
        "Prompt and answer together do not fit into the model's context.",
        "Shorten the prompt, or lower `max_tokens`.",
    ),
    "prompt_too_long": About(
        "The prompt exceeds a limit that the operator set, although the model's context is larger.",
        "Shorten the prompt, or ask the operator to raise the limit (`[gateway.limits]`).",
    ),
    "too_many_tokens": About(
        "Prompt and answers together exceed a limit that the operator set.",
        "Lower `max_tokens` or `n`, shorten the prompt, or send fewer inputs per request.",
    ),
    "too_large": About(
        "A field, list or conversation is larger than its limit.",
        "Make it smaller. The message says what the limit is.",
    ),
    "too_many_values": About(
        "The JSON has more lists, objects and fields than the gateway reads.",
        "Split the request, or simplify its largest field.",
    ),
    "invalid_request": About(
        "The worker or the model's server rejected the request after the gateway accepted it.",
        "Fix what the message names. If it names nothing that you sent, ask the operator to compare the settings of"
        " the gateway and the pool.",
    ),
    "answer_too_large": About(
        "A response that is not streamed outgrew what the gateway buffers for one key or team.",
        "Set `stream` to true, or ask for fewer tokens, choices or log-probabilities.",
    ),
    "request_too_large": About(
        "The body or file exceeds its size limit.",
        "Send less. The message says what the limit is.",
    ),
    "unsupported_content_encoding": About(
        "The body is compressed in a way that this route does not accept.",
        "Send it uncompressed, or as gzip or zstd where the message offers these.",
    ),
    "malformed_http": About(
        "The bytes on the connection are not a valid HTTP/1.1 request.",
        "Check the client and every proxy before the gateway. The gateway closes the connection.",
    ),
    "head_too_large": About(
        "The request line and headers exceed their size limit, or there are too many headers.",
        "Send fewer or shorter headers; large cookies are a frequent cause.",
    ),
    "request_timeout": About(
        "The headers, the body or an upload did not arrive within the time limit.",
        "Retry. If it happens again, check the network between the client and the gateway.",
    ),
    "slow_client": About(
        "The client read its stream so slowly that the gateway's buffer filled up.",
        "Read events as they arrive, and do the work on them elsewhere.",
    ),
}
_ACCESS: Final = {
    "invalid_api_key": About(
        "The API key is missing, misspelled, expired or revoked.",
        "Check the `Authorization: Bearer` or `x-api-key` header. `spillway keys list` shows active keys.",
    ),
    "key_revoked": About(
        "The API key was revoked while its request or batch was running.",
        "Use another key. For a batch, results written before the revocation are kept.",
    ),
    "missing_scope": About(
        "The API key is valid but does not have the scope that this route requires.",
        "Use a key with the scope that the message names.",
    ),
    "login_required": About(
        "The console's route requires a session, and there is none or it has expired.",
        "Log in, then repeat the action.",
    ),
    "foreign_origin": About(
        "A page of another site tried to make a change with your session.",
        "Open the console itself. Behind a proxy, check that it keeps the `Host` header.",
    ),
    "role_not_allowed": About(
        "Your console role does not permit this action.",
        "Ask an administrator to do it, or to change your role.",
    ),
    "model_not_found": About(
        "No model has this name, or the API key is not allowed to use it.",
        "Use a name from `GET /v1/models`. The operator can extend the key's list of models.",
    ),
    "hosted_not_allowed": About(
        "Only hosted pools can serve the request, and the key, its team or the request forbids them.",
        "Allow the provider with the `allow_hosted` policy, or use a model that your own pools serve.",
    ),
    "no_trusted_pool": About(
        "The API key or its team requires trusted pools, and the model has none.",
        "Use another model, or have the operator add a trusted pool.",
    ),
    "only_trusted_pools": About(
        "The model has only trusted pools, and the API key does not require them.",
        "Use a key with `trusted_only`, or another model.",
    ),
    "not_found": About(
        "No object has this id or name, or it is another team's.",
        "Check the id. Files, batches and responses are deleted when they expire.",
    ),
    "unknown_url": About(
        "No route has this path.",
        "Check the base URL: OpenAI clients need one that ends in `/v1`, Anthropic clients one that does not.",
    ),
    "method_not_allowed": About(
        "The path exists, but not for this HTTP method.",
        "Use a method that the `Allow` header lists.",
    ),
}
_STATE: Final = {
    "name_in_use": About(
        "Another object has this name.",
        "Choose another name.",
    ),
    "changed_meanwhile": About(
        "The object was changed by another person after you opened the form.",
        "Reload the page, check the new values, and repeat your change.",
    ),
    "idempotency_key_reused": About(
        "A request with this `Idempotency-Key` but a different path or body was sent before.",
        "Use a new key for each distinct request.",
    ),
    "idempotency_answer_not_kept": About(
        "The request with this `Idempotency-Key` is running, but its answer is too large to be kept for a second"
        " reader.",
        "Read the first request's answer. A new key runs, and bills, the request again.",
    ),
    "idempotency_key_busy": About(
        "The gateway that runs the request with this `Idempotency-Key` does not respond.",
        "Retry with the same key.",
    ),
    "previous_response_not_found": About(
        "`previous_response_id` names a response that does not exist, was not stored, or is not complete.",
        "Send the conversation in `input`, or wait until the previous response is complete.",
    ),
    "response_in_progress": About(
        "A response that is being generated cannot be deleted.",
        "Cancel it first.",
    ),
    "batch_is_over": About(
        "A batch that has ended cannot be canceled.",
        "No action is needed.",
    ),
    "batch_is_not_over": About(
        "A batch that is running cannot be deleted.",
        "Cancel it first, then wait until it has ended.",
    ),
    "file_in_use": About(
        "A running batch reads this file, so it cannot be deleted.",
        "Cancel the batch, or wait until it has ended.",
    ),
    "empty_file": About(
        "The file has no content or no lines.",
        "Upload a file with at least one line.",
    ),
}
_LIMITS: Final = {
    "rate_limit_exceeded": About(
        "The key or its team reached a limit: requests or tokens per minute, concurrent requests, or a budget whose"
        " rest is reserved by running requests. `type` says which.",
        "Wait for `Retry-After`. If the message says that the request is too large, make it smaller: waiting does not"
        " help.",
    ),
    "insufficient_quota": About(
        "The budget of the key or its team is used up, or too little is left for this request.",
        "Raise the budget, wait for the next period, or make the request smaller.",
    ),
    "too_many_connections": About(
        "This address has too many open connections.",
        "Reuse connections: share one client object.",
    ),
    "too_many_uploads": About(
        "The key or its team has too many uploads in progress at this gateway.",
        "Wait until one of them ends.",
    ),
    "file_quota_exceeded": About(
        "The files of the key or its team reached their limit.",
        "Delete files that you no longer need.",
    ),
    "too_many_batches": About(
        "The key or its team has too many batches that have not ended.",
        "Wait until one ends, or cancel one.",
    ),
    "too_many_stored_responses": About(
        "The stored responses of the key or its team reached their limit.",
        "Delete responses, or send `store: false`.",
    ),
    "tenant_in_flight_exceeded": About(
        "The key or its team has as many requests in flight as the operator allows.",
        "Retry after one has ended, or ask the operator to raise `max_in_flight` of this tenant.",
    ),
    "tenant_queued_exceeded": About(
        "The key or its team has as many requests waiting as the operator allows.",
        "Retry later, or ask the operator to raise `max_queued` of this tenant.",
    ),
}
_CAPACITY: Final = {
    "too_many_queued": About(
        "Too many requests are waiting for this model.",
        "Retry after `Retry-After`. Operators: add workers, or raise the queue limits (`[gateway.limits]`).",
    ),
    "too_many_queued_tokens": About(
        "The requests waiting for this model have too many prompt tokens.",
        "Retry after `Retry-After`, or shorten the prompt.",
    ),
    "too_many_queued_bytes": About(
        "The requests waiting for this model, or those of this key or team, fill their share of the queue.",
        "Retry after `Retry-After`.",
    ),
    "wait_too_long": About(
        "The estimated wait is longer than the client or the gateway's `queue_wait_s` permits, or the model's servers"
        " asked for a longer pause.",
        "Retry after `Retry-After`, or raise the client's timeout.",
    ),
    "no_free_place": About(
        "The request asked not to be queued, and no worker had a free slot.",
        "Send it to another model or provider, or retry after `Retry-After`.",
    ),
    "no_workers": About(
        "No worker of this model is alive, and the request cannot wait for one.",
        "Retry after `Retry-After`. Operators: `spillway status` lists workers and what they wait for.",
    ),
    "queue_wait_timeout": About(
        "No worker took the request within the queue wait limit.",
        "Retry. Operators: add workers, or check with `spillway status` why they take no jobs.",
    ),
    "queue_full": About(
        "The queue server's stream is full.",
        "Retry after `Retry-After`. Operators: raise `[nats.queue]` limits, or add workers.",
    ),
    "overloaded": About(
        "The gateway is at one of its limits: open requests, uploads, conversations being rendered, memory for bodies.",
        "Retry after `Retry-After`. Operators: add gateways.",
    ),
    "model_not_ready": About(
        "The model is configured, but no worker has published its tokenizer yet.",
        "Retry. Operators: the message says what the pools wait for; `spillway status` shows more.",
    ),
    "limits_unavailable": About(
        "The gateway cannot read how much of the key's limits is left.",
        "Retry. Operators: check that the queue server and the database respond.",
    ),
    "usage_not_stored": About(
        "Usage records can be stored neither at the queue server nor on the gateway's disk, so no request is accepted.",
        "Retry. Operators: check the queue server, and free space in the gateway's `data_dir`.",
    ),
    "database_unavailable": About(
        "The database does not respond. Requests with known API keys are still answered.",
        "Retry. Operators: check the database.",
    ),
    "storage_unavailable": About(
        "The storage for files or responses does not respond.",
        "Retry. Operators: check the folder or bucket of `[batches]`, and the queue server.",
    ),
    "shutting_down": About(
        "The gateway is shutting down.",
        "Retry at once: another gateway or the restarted one answers.",
    ),
}
_TIME: Final = {
    "deadline_exceeded": About(
        "The deadline that the client set in `x-spillway-deadline-ms` has passed.",
        "Set a later deadline, or ask for fewer tokens.",
    ),
    "first_token_timeout": About(
        "A worker took the request but sent no token within `first_token_s`.",
        "Shorten the prompt. Operators: the worker is overloaded or its server hangs; check its log.",
    ),
    "inter_token_timeout": About(
        "The worker stopped sending tokens for longer than `inter_token_s`, and no other worker was free.",
        "Operators: check the worker's log. SDKs do not retry, because the whole wait would begin again.",
    ),
    "total_timeout": About(
        "The request took longer than `total_s`.",
        "Ask for fewer tokens. Operators: raise `[gateway.timeouts] total_s`.",
    ),
}
_FAILED: Final = {
    "attempts_exhausted": About(
        "The request failed on several workers; the message names the last failure.",
        "Do not retry the same request unchanged. Operators: the request's page in the console lists every attempt.",
    ),
    "answer_cut": About(
        "A stream was interrupted after text had been sent, and no worker can resume it.",
        "Send the request again.",
    ),
    "model_changed": About(
        "The model's weights or tokenizer were replaced while the request waited or its answer was being generated.",
        "Send the request again.",
    ),
    "internal_error": About(
        "The gateway or a worker has a bug, or received something that it cannot process.",
        "Retry once. If it fails again, report the request id (`x-request-id`) with the gateway's log.",
    ),
}
_ATTEMPTS: Final = {
    "engine_error": About(
        "The engine or the model's server failed this attempt.",
        "Check the worker's log. The gateway makes further attempts.",
    ),
    "engine_busy": About(
        "The model's server asked to wait (429 or 503).",
        "No action is needed: the attempt does not count as a failure.",
    ),
    "engine_died": About(
        "The engine's process ended.",
        "Check the worker's log. The gateway resumes the answer on another worker.",
    ),
    "worker_draining": About(
        "The worker is shutting down and handed the request back.",
        "No action is needed: the gateway resumes the answer on another worker.",
    ),
    "worker_lost": About(
        "The worker stopped sending heartbeats, lost its connection, or no longer knows the request.",
        "Check the worker's machine. The gateway resumes the answer on another worker.",
    ),
    "job_vanished": About(
        "The job is no longer in the queue, and no worker reported that it accepted it.",
        "No action is needed: the gateway queues the job again.",
    ),
    "unknown_attempt": About(
        "The gateway asked a worker about an attempt that the worker does not know.",
        "No action is needed: the gateway makes another attempt.",
    ),
    "gateway_lost": About(
        "The gateway of this request ended before the request did.",
        "Check why the gateway ended. The ledger closes the request's row.",
    ),
}
_LINES: Final = {
    "invalid_json_line": About("The line is not a JSON object.", "Fix the line. Save the file as UTF-8."),
    "invalid_custom_id": About("`custom_id` is empty or too long.", "Use 1 to 512 characters."),
    "duplicate_custom_id": About("Two lines have the same `custom_id`.", "Give each line a unique `custom_id`."),
    "invalid_method": About("`method` is not POST.", "Set `method` to POST."),
    "invalid_url": About("`url` is not the endpoint of the batch.", "Set `url` to the batch's endpoint."),
    "line_too_large": About("The line exceeds the size limit of a request.", "Shorten the request of this line."),
    "too_many_lines": About("The file has more lines than a batch may have.", "Split the file."),
    "batch_expired": About(
        "The completion window ended before this line was answered.",
        "Create a batch with the lines of the error file, with a longer `completion_window`.",
    ),
    "batch_cancelled": About("The batch was canceled before this line was answered.", "No action is needed."),
    "input_file_deleted": About("The input file was deleted while the batch ran.", "Upload it and create a new batch."),
    "set_aside": About(
        "The batch failed several times in the same way, and the gateways gave it up.",
        "Operators: the console's page Set aside shows the reason. Create a new batch after you have fixed it.",
    ),
}

GROUPS: Final = (
    Group("The request", _REQUEST),
    Group("Keys, roles and names", _ACCESS),
    Group("State of objects", _STATE),
    Group("Limits of keys and teams", _LIMITS),
    Group("Capacity", _CAPACITY),
    Group("Time limits", _TIME),
    Group("Failed requests", _FAILED),
    Group("Codes of attempts, in records and logs", _ATTEMPTS),
    Group("Codes in files of batches", _LINES),
)
ABOUT: Final[dict[str, About]] = {code: about for group in GROUPS for code, about in group.codes.items()}
