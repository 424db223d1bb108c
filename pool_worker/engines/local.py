"""Spillway's own engine (package ``engine``), running in a dedicated thread.

    event loop ──inbox (submit, cancel)──> engine thread ──one call per step──> event loop

The thread sleeps while idle, and waits while it is STEPS_AHEAD steps ahead of what the worker has read. torch releases
the GIL while it computes, so the event loop keeps running.
"""

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from engine import ConfigError, EngineConfig, LLMEngine, RequestRejected
from engine.model.weights import WeightsDigest, digest_of, optional_file
from engine.pooling.pooling import PoolingEngine
from engine.pooling.pooling_folder import task_of
from engine.pooling.pooling_types import PoolingRequest
from engine.types import EngineInfo, EngineStats, GenerationRequest, Refusal, SequenceOutput, sequences_that_fit
from pool_worker.engines.base import Capacity, EngineDiedError
from pool_worker.engines.pooling import (
    pooling_capacity,
    pooling_card,
    pooling_options,
    refuse_settings_of_other_tasks,
)
from pool_worker.settings import LocalEngineSettings
from protocol.generation import GENERATION_CONFIG, SAMPLING_DEFAULTS, sampling_defaults
from protocol.job import PROTOCOL_VERSION, CountedBy, ModelCard
from protocol.nats.objects import tokenizer_object_name

STEPS_AHEAD: Final = 8
STOP_LIMIT_S: Final = 10.0  # for the step in progress

log = logging.getLogger(__name__)

_Message = GenerationRequest | PoolingRequest | str  # a request to add, or the id of one to cancel
_Tokenizers = dict[str | None, PreTrainedTokenizerBase]  # of the model (None), and of adapters with their own


class LocalEngine:
    """Spillway's own engine in a thread; see ``base.Engine`` for the life cycle."""

    name = "spillway"
    takes: Literal["ids", "text"] = "ids"
    continues = True
    counted_by: CountedBy = "engine"
    honoured = SAMPLING_DEFAULTS
    facts_watch = None

    def __init__(self, settings: LocalEngineSettings) -> None:
        self._settings = settings
        self._inbox: deque[_Message] = deque()  # requests to add, ids to cancel
        self._inbox_changed = threading.Condition()
        self._is_stopping = False
        self._may_step = threading.Semaphore(STEPS_AHEAD)
        self._steps: deque[list[SequenceOutput]] = deque()  # computed but not read; at most STEPS_AHEAD
        self._steps_changed = asyncio.Event()
        self._death: EngineDiedError | None = None
        self._engine: LLMEngine | PoolingEngine
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[tuple[Capacity, _Tokenizers]]
        self._tokenizers: _Tokenizers
        self._weights = ""  # without adapters
        self._sampling: dict[str, float] = {}  # the model's own defaults
        self._tokenizer_jsons: dict[str, bytes] = {}  # by object name: most adapters share their model's
        self._max_model_len = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> Capacity:
        """Load the model in the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._thread.start()
        capacity, self._tokenizers = await self._loaded
        self._max_model_len = capacity.max_model_len
        return capacity

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """Return the card of ``model`` and its tokenizer.json."""
        base = self._tokenizers[None]
        tokenizer = self._tokenizers.get(model, base)
        tokenizer_json = tokenizer.backend_tokenizer.to_str().encode()
        object_name = tokenizer_object_name(tokenizer_json)
        templates = _chat_templates(tokenizer) or _chat_templates(base)
        card = ModelCard(
            v=PROTOCOL_VERSION,
            model=model,
            context_length=self._max_model_len,
            tokenizer_object=object_name,
            chat_template=templates.get("default"),
            special_tokens=_special_tokens(tokenizer),
            tool_template=templates.get("tool_use"),
            pooling=pooling_card(self._engine.info) if isinstance(self._engine, PoolingEngine) else None,
            revision=self._revision(model, object_name),
            sampling=self._sampling,
        )
        return card, self._tokenizer_jsons.setdefault(object_name, tokenizer_json)

    def _revision(self, model: str, tokenizer_object: str) -> str:
        info = self._engine.info
        adapters = info.adapters if isinstance(info, EngineInfo) else ()
        digest = next((adapter.digest for adapter in adapters if adapter.name == model), None)
        if digest is not None:
            return digest_of(self._weights, digest, tokenizer_object)
        return self._settings.revision or digest_of(self._weights, tokenizer_object)

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """Accept a request without blocking."""
        self._post(request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; unknown ids are ignored."""
        self._post(request_id)

    async def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        """Yield the outputs of each engine step."""
        while not self._is_stopping:
            while self._steps:
                outputs = self._steps.popleft()
                self._may_step.release()
                yield outputs
            if self._death is not None:
                raise self._death
            await self._steps_changed.wait()
            self._steps_changed.clear()

    def stats(self) -> EngineStats:
        """Return statistics for the worker's heartbeats."""
        return self._engine.stats()

    async def stop(self) -> None:
        """Stop everything and free its resources."""
        with self._inbox_changed:
            self._is_stopping = True
            self._inbox_changed.notify()
        self._may_step.release()
        self._steps_changed.set()
        has_loaded = self._max_model_len > 0  # otherwise the thread cannot be interrupted
        if has_loaded:
            await asyncio.to_thread(self._thread.join, STOP_LIMIT_S)

    def _post(self, message: _Message) -> None:
        with self._inbox_changed:
            self._inbox.append(message)
            self._inbox_changed.notify()

    # --- in the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine, self._weights = _load(self._settings)
            if isinstance(engine, LLMEngine):
                self._sampling = _sampling(self._settings.path)
            started_s = time.monotonic()
            engine.warm_up()
            log.info("warmed up in %.1f s", time.monotonic() - started_s)
        except Exception as error:  # noqa: BLE001 - a model folder can fail in any way, and the operator needs the reason
            reason = EngineDiedError(f"cannot load {self._settings.path}: {str(error) or type(error).__name__}")
            self._call(self._end_loading, reason)
            return
        self._engine = engine
        log.info("loaded %s: %s", self._settings.path, engine.info)
        if isinstance(engine, PoolingEngine):
            capacity = pooling_capacity(engine_config(self._settings), engine.info)
        else:
            capacity = _capacity(self._settings, engine.info)
        self._call(self._end_loading, (capacity, engine.tokenizers))
        try:
            self._step_until_stopped(engine)
        except Exception as error:
            log.exception("the engine's step failed")
            self._call(self._die, EngineDiedError(f"{type(error).__name__}: {error}"))

    def _step_until_stopped(self, engine: LLMEngine | PoolingEngine) -> None:
        while True:
            messages = self._next_messages(engine)
            if self._is_stopping:
                return
            if isinstance(engine, LLMEngine) and not (messages or engine.has_unfinished()):
                engine.sleep()
                log.info(
                    "no request for %g s: releasing the KV memory until the next one", self._settings.sleep_after_s
                )
                continue
            outputs: list[SequenceOutput] = [refusal for message in messages if (refusal := _handle(engine, message))]
            outputs += engine.step()
            if outputs:
                self._may_step.acquire()
                self._call(self._take, outputs)

    def _next_messages(self, engine: LLMEngine | PoolingEngine) -> list[_Message]:
        """Take the messages in the inbox; if there is nothing to compute, wait for one until it is time to sleep."""
        can_sleep = isinstance(engine, LLMEngine) and not engine.is_sleeping
        wait_s = self._settings.sleep_after_s if can_sleep else None
        with self._inbox_changed:
            self._inbox_changed.wait_for(
                lambda: self._inbox or self._is_stopping or engine.has_unfinished(), timeout=wait_s
            )
            messages = list(self._inbox)
            self._inbox.clear()
        return messages

    def _call(self, function: Callable[[Any], None], argument: object) -> None:
        """Run a function on the event loop. Does nothing if the loop is closed: the process is ending."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    # --- on the event loop, called by the thread ----------------------------------------------------------------------

    def _end_loading(self, outcome: tuple[Capacity, _Tokenizers] | EngineDiedError) -> None:
        if self._loaded.done():
            return  # no longer awaited
        if isinstance(outcome, EngineDiedError):
            self._loaded.set_exception(outcome)
        else:
            self._loaded.set_result(outcome)

    def _take(self, outputs: list[SequenceOutput]) -> None:
        self._steps.append(outputs)
        self._steps_changed.set()

    def _die(self, death: EngineDiedError) -> None:
        self._death = death
        self._steps_changed.set()


def _load(settings: LocalEngineSettings) -> tuple[LLMEngine | PoolingEngine, str]:
    """Load a model of any kind; return it with the revision of its weights."""
    task = task_of(settings.path, settings.task)
    refuse_settings_of_other_tasks(settings, task)
    digest = WeightsDigest(settings.path)
    if task == "generate":
        engine = load(settings)
        return engine, settings.revision or digest_of(digest.result(), engine.info.dtype, engine.info.quantize or "")
    disable_progress_bar()  # the worker's output is a log
    pooling = PoolingEngine.from_pretrained(settings.path, task, engine_config(settings), pooling_options(settings))
    _require_tokenizer_json(pooling.tokenizers)
    return pooling, settings.revision or digest_of(digest.result(), str(pooling_card(pooling.info)), settings.dtype)


def load(settings: LocalEngineSettings) -> LLMEngine:
    """Load a text model and its adapters.

    Raises what transformers and the engine raise for a model that cannot be loaded.
    """
    disable_progress_bar()  # the worker's output is a log
    engine = LLMEngine.from_pretrained(settings.path, engine_config(settings))
    _require_tokenizer_json(engine.tokenizers)
    return engine


def _require_tokenizer_json(tokenizers: _Tokenizers) -> None:
    for adapter, tokenizer in tokenizers.items():
        if not tokenizer.is_fast:
            whose = "it" if adapter is None else f"adapters.{adapter}"
            raise ValueError(f"{whose} has no tokenizer.json, which gateways need to count tokens")


def _capacity(settings: LocalEngineSettings, info: EngineInfo) -> Capacity:
    for adapter in info.adapters:
        log.info(
            "adapter %s: rank %s in %d layers, %.1f MiB",
            *(adapter.name, "-".join(map(str, sorted(set(adapter.ranks)))), adapter.layers, adapter.bytes / 2**20),
        )
    fits = ", ".join(f"{count} of {length}" for length, count in sequences_that_fit(info).items())
    log.info("%d tokens of KV memory fit these numbers of sequences by length: %s", info.kv_tokens, fits)
    kv_tokens = int(info.kv_tokens * settings.kv_overcommit)
    return Capacity(info.max_sequences, kv_tokens, info.max_model_len, info.max_sequences, info.kv_tokens)


def engine_config(settings: LocalEngineSettings) -> EngineConfig:
    """Translate the settings. Raises ConfigError."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    if settings.sleep_after_s is not None and device != "cpu":
        raise ConfigError("sleep_after_s", "only supported on a CPU")
    chosen: dict[str, Any] = {"kv_bytes": settings.kv_mib and settings.kv_mib * 1024 * 1024}
    return EngineConfig(
        dtype=settings.dtype,
        quantize=settings.quantize,
        device=device,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cuda_graphs=settings.cuda_graphs,
        max_model_len=settings.max_model_len,
        max_sequences=settings.max_sequences,
        max_batched_tokens=_batched_tokens(settings, device),
        threads=settings.threads,
        prefix_cache=settings.prefix_cache,
        adapters=settings.adapters,
        draft_tokens=settings.draft_tokens,
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _batched_tokens(settings: LocalEngineSettings, device: str) -> int:
    if settings.max_batched_tokens is not None:
        return settings.max_batched_tokens
    # A CPU computes prompts a fifth slower in steps of 2,048, and running streams stall for as long.
    return max(512 if device == "cpu" else 2048, settings.max_sequences)


def _handle(engine: LLMEngine | PoolingEngine, message: _Message) -> SequenceOutput | None:
    if isinstance(message, str):
        engine.abort(message)
        return None
    try:
        _add(engine, message)
    except RequestRejected as error:
        return Refusal.of(message.request_id, error)
    except Exception as error:  # noqa: BLE001  # one bad request must not end the others in its batch
        return SequenceOutput.failure(message.request_id, repr(error))
    return None


def _add(engine: LLMEngine | PoolingEngine, request: GenerationRequest | PoolingRequest) -> None:
    match engine, request:
        case LLMEngine(), GenerationRequest():
            engine.add_request(request)
        case PoolingEngine(), PoolingRequest():
            engine.add_request(request)
        case _:
            made = "vectors" if isinstance(engine, PoolingEngine) else "text"
            raise RequestRejected("model", f"this model makes {made} only")


def _chat_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the model's chat templates by name; one without a name is "default"."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return template
    return {"default": template} if template else {}


def _sampling(path: str) -> dict[str, float]:
    file = optional_file(path, GENERATION_CONFIG)
    return {} if file is None else sampling_defaults(json.loads(file.read_text()))


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
