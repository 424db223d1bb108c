"""docs/reference/errors.md: every error code, and every message that it can have."""

from collections.abc import Iterator
from typing import Final

from gateway.documentation.error_catalog import Entry, entries
from tests.reference.error_messages import messages_by_code
from tests.reference.recorder import DOCUMENT, FENCE, OTHER_TEXTS
from tests.reference.source_texts import is_open

__all__ = ["DOCUMENT", "document"]
_HEAD: Final = """\
# Error codes

<!-- Written by `python -m tests.reference` from gateway/error_codes.py and the source. Do not edit. -->

Every error has a stable `code`. Match on the code or the HTTP status, never on the message: messages may change.

```json
{"error": {"message": "The model `x` does not exist or you do not have access to it.", "type": "invalid_request_error",
           "param": "model", "code": "model_not_found", "doc_url": "/docs/errors#model_not_found"}}
```

- `doc_url` links to the code's entry at the gateway itself, `GET /docs/errors`, which needs no API key and no internet.
  It begins with `[auth] public_url` if that is set. Otherwise it is relative to the gateway's address.
- `param` names the field of the request that is wrong, or is null.
- `x-should-retry` and `Retry-After` say whether and when to retry. The official SDKs follow them.
- `x-request-id` names the request in logs, in the ledger and in the console.
- Anthropic's API has its own shape: `{"type": "error", "error": {"type", "message", "doc_url"}, "request_id"}`. The end
  of `doc_url` is the code. Types follow the status: 400 `invalid_request_error`, 401 `authentication_error`, 403
  `permission_error`, 404 `not_found_error`, 408 and 504 `timeout_error`, 413 `request_too_large`, 429
  `rate_limit_error`, 503 `overloaded_error`, all others `api_error`.
- A stream that fails after its first event ends with an event that has the same error, and the connection is closed.
- A failed Responses object has OpenAI's own codes in `error.code`: `rate_limit_exceeded` or `server_error`. The
  message is the same.
- A line of a batch has the same error in `response.body`. A line that never ran has only `error.code` and
  `error.message`.

In messages below, `{…}` stands for a value.
"""


def document() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_lines()])


def _lines() -> Iterator[str]:
    for title, several in entries().items():
        yield f"## {title}\n"
        for entry in several:
            yield from _entry_lines(entry)


def _entry_lines(entry: Entry) -> Iterator[str]:
    known = messages_by_code().get(entry.code, [])
    texts = [text for text in known if not is_open(text)]
    yield f"### {entry.code}\n"
    yield f"{entry.facts}\n"
    yield f"**Cause.** {entry.about.cause}\n"
    yield f"**What to do.** {entry.about.advice}\n"
    if texts:
        yield "\n".join([f"{FENCE}text", *texts, FENCE, ""])
    if len(texts) < len(known) or not texts:
        yield f"{OTHER_TEXTS}\n"
