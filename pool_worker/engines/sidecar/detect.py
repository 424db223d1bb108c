"""Detects the kind of inference server at a URL from its answers.

OpenAI-style servers name themselves as the owner of their models; the others have their own pages.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.server_client import client_of, final_advice, shown
from pool_worker.engines.sidecar.readiness import Readiness
from pool_worker.settings import ServerEngineSettings
from protocol.http_client import httpx
from protocol.wire import UNDECODABLE

ANSWER_LIMIT_S: Final = 5.0
ANSWER_LIMIT_BYTES: Final = 1024 * 1024
OWNERS: Final[Mapping[str, str]] = {  # `owned_by` in /v1/models → kind
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "lmdeploy": "lmdeploy",
    "tensorrt_llm": "trtllm",
}

_Answer = Mapping[str, Any]
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def _by_owner(answer: _Answer) -> str | None:
    models = answer.get("data")
    first = models[0] if isinstance(models, list) and models else None
    return OWNERS.get(str(first.get("owned_by"))) if isinstance(first, dict) else None


# In this order: a server with its own page often has an OpenAI-style one, too.
PROBES: Final[tuple[tuple[str, Callable[[_Answer], str | None]], ...]] = (
    ("/v1/models", _by_owner),
    ("/props", lambda answer: "llamacpp" if "total_slots" in answer else None),
    ("/get_model_info", lambda answer: "sglang" if "model_path" in answer else None),
    ("/info", lambda answer: "tgi" if {"model_id", "max_total_tokens"} <= set(answer) else None),
    ("/api/version", lambda answer: "ollama" if "version" in answer else None),
    ("/v2", lambda answer: "triton" if answer.get("name") == "triton" else None),
)


async def detect(settings: ServerEngineSettings, wait: Readiness | None = None) -> str:
    """Wait until a server answers; return its kind. Raises EngineDiedError."""
    timeout = httpx.Timeout(ANSWER_LIMIT_S, connect=settings.connect_s)
    async with client_of(settings, timeout=timeout) as client:
        url = shown(str(client.base_url))
        wait = wait or Readiness(url, settings.ready_s)
        while True:
            try:
                kind, statuses = await _ask(client)
            except httpx.HTTPError as error:
                advice = final_advice(error)
                if advice is not None:
                    raise EngineDiedError(f"{url}: {error}; {advice}") from error
                await wait.not_yet(str(error) or type(error).__name__)
                continue
            if kind is None and statuses & {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
                raise EngineDiedError(f"{url} rejected the credentials (engine.api_key)")
            if kind is None:
                raise EngineDiedError(f"cannot detect the kind of server at {url}; set --engine-kind (engine.kind)")
            return kind


async def _ask(client: httpx.AsyncClient) -> tuple[str | None, set[int]]:
    """Return a server's kind, and the statuses of its answers.

    Raises httpx.HTTPError if it does not answer, or asks to retry later.
    """
    statuses: set[int] = set()
    for path, kind_of in PROBES:
        async with client.stream("GET", path) as response:
            if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                response.raise_for_status()
            body = b""
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > ANSWER_LIMIT_BYTES:
                    break
        statuses.add(response.status_code)
        if not response.is_success:
            continue
        try:
            kind = kind_of(_decode(body))
        except UNDECODABLE:
            continue
        if kind is not None:
            return kind, statuses
    return None, statuses
