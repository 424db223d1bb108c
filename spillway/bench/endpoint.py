"""Any OpenAI-compatible endpoint over HTTP: TTFT and TPOT as clients see them.

Prompts are random numbers as words. The number of words per token is derived from the usage counts of two small
requests, so no tokenizer is needed. Every OpenAI-compatible server supports chat completions, so these are measured.
"""

import asyncio
import json
import random
import time
from typing import Any, Final

from pool_worker.engines.framing import DONE, MalformedEvent, sse_events
from protocol.distribution import version
from protocol.http_client import httpx
from spillway.bench.measure import Answer, BenchError, Load, LoadRefused, Piece

REQUEST_LIMIT_S: Final = 600.0
CONNECT_LIMIT_S: Final = 10.0
PROBE_WORDS: Final = (50, 250)
REASON_CHARS: Final = 300
LARGEST_WORD: Final = 999


class EndpointTarget:
    """A ``measure.Target`` for an HTTP endpoint."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        """Measure the prompt size at ``url``, with or without "/v1"; ``model`` None: the first. Raises BenchError."""
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._extra: dict[str, Any] = {"ignore_eos": True}
        self._model = model or self._first_model()
        self._tokens_per_word, self._template_tokens = self._measure_prompt_size()

    def run(self, load: Load, seed: int) -> list[Answer]:
        """Run one load, as ``measure.Target`` requires."""
        source = random.Random(seed)  # noqa: S311 - nothing secret
        words = max(1, round((load.prompt_tokens - self._template_tokens) / self._tokens_per_word))
        return asyncio.run(self._run([random_words(source, words) for _ in range(load.batch)], load.new_tokens))

    def environment(self) -> dict[str, Any]:
        """Return the endpoint's facts for the report."""
        return {
            "url": self._base,
            "model": self._model,
            "ends_ignored": bool(self._extra),
            "spillway": version(),
        }

    def _first_model(self) -> str:
        listed = self._ask("GET", "/models").get("data") or []
        if not listed:
            raise BenchError(f"{self._base} lists no model; name one with --model")
        return str(listed[0]["id"])

    def _measure_prompt_size(self) -> tuple[float, float]:
        source = random.Random(0)  # noqa: S311 - nothing secret
        try:
            few, many = (self._count(random_words(source, words)) for words in PROBE_WORDS)
        except BenchError:
            # A server without vLLM's fields rejects them. Without ignore_eos, answers may end before new_tokens.
            self._extra = {}
            few, many = (self._count(random_words(source, words)) for words in PROBE_WORDS)
        size = prompt_size(few, many)
        if size is None:
            raise BenchError(
                f"{self._base} reports implausible usage: {few} and {many} prompt tokens for {PROBE_WORDS} words"
            )
        return size

    def _count(self, prompt: str) -> int:
        usage = self._ask("POST", "/chat/completions", self._body(prompt, 1)).get("usage") or {}
        if not isinstance(usage.get("prompt_tokens"), int):
            raise BenchError(f"{self._base} does not report usage")
        return int(usage["prompt_tokens"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = httpx.request(
                method, self._base + path, json=body, headers=self._headers, timeout=_timeout()
            ).raise_for_status()
            found = answer.json()
        except httpx.HTTPStatusError as error:
            raise BenchError(f"{self._base}{path}: {_reason(error.response)}") from error
        except (httpx.HTTPError, ValueError) as error:
            raise BenchError(f"{self._base}{path}: {str(error) or type(error).__name__}") from error
        return found if isinstance(found, dict) else {}

    def _body(self, prompt: str, new_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": new_tokens,
            "temperature": 0,
            **self._extra,
        }

    async def _run(self, prompts: list[str], new_tokens: int) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(headers=self._headers, timeout=_timeout(), limits=limits) as client:
            start_s = time.perf_counter()
            asked = [self._stream(client, self._body(prompt, new_tokens), start_s) for prompt in prompts]
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    return await asyncio.gather(*asked)
            except TimeoutError:
                raise BenchError(f"{self._base}: no answer within {REQUEST_LIMIT_S:.0f} s") from None
            except (httpx.HTTPError, MalformedEvent, ValueError) as error:
                raise BenchError(f"{self._base}: {str(error) or type(error).__name__}") from error

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], start_s: float) -> Answer:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        moments, usage = [], None
        async with client.stream("POST", f"{self._base}/chat/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                raise LoadRefused(_reason(response))
            async for event in sse_events(response.aiter_bytes()):
                if event == DONE:
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    raise LoadRefused(str(chunk["error"])[:REASON_CHARS])
                usage = chunk.get("usage") or usage
                if any(_holds_tokens(choice) for choice in chunk.get("choices") or ()):
                    moments.append(time.perf_counter() - start_s)
        if not usage or not moments:
            raise LoadRefused("an answer had no tokens or no usage counts")
        share = usage["completion_tokens"] / len(moments)
        return Answer(usage["prompt_tokens"], [Piece(moment, share) for moment in moments])


def prompt_size(few: int, many: int) -> tuple[float, float] | None:
    """Return tokens per word and tokens of the template, from the counts of ``PROBE_WORDS``; None: implausible."""
    per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    return None if per_word <= 0 else (per_word, few - PROBE_WORDS[0] * per_word)


def random_words(source: random.Random, words: int) -> str:
    """Return a text of ``words`` random numbers, which is in no cache."""
    return " ".join(str(source.randint(0, LARGEST_WORD)) for _ in range(words))


def _holds_tokens(choice: dict[str, Any]) -> bool:
    """Return whether a chunk has output. The first often has only a role, the last only the finish reason."""
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def _reason(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text[:REASON_CHARS]}"


def _timeout() -> httpx.Timeout:
    return httpx.Timeout(REQUEST_LIMIT_S, connect=CONNECT_LIMIT_S)
