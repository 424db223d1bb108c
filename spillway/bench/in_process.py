"""Spillway's engine in this process, without gateway or queue: the upper bound for a pool's worker."""

import os
import platform
import random
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine import EngineError, GenerationRequest, LLMEngine, RequestRejected, SamplingParams
from pool_worker.engines.local import load as load_engine
from pool_worker.settings import LocalEngineSettings
from protocol import distribution
from spillway.bench.measure import Answer, BenchError, Load, LoadRefused, Piece


class EngineTarget:
    """A ``measure.Target`` for Spillway's engine."""

    def __init__(self, settings: LocalEngineSettings) -> None:
        """Load the model. Raises BenchError."""
        self._settings = settings
        try:
            self._engine = load_engine(settings)
        except (EngineError, OSError, ValueError) as error:
            raise BenchError(f"{settings.path} cannot be loaded: {error}") from error

    def run(self, load: Load, seed: int) -> list[Answer]:
        """Run one load, as ``measure.Target`` requires."""
        vocabulary = range(self._engine.info.vocab_size)
        source = random.Random(seed)  # noqa: S311 - nothing secret
        params = SamplingParams(temperature=0.0, max_tokens=load.new_tokens, ignore_eos=True)
        requests = [
            GenerationRequest(str(number), source.choices(vocabulary, k=load.prompt_tokens), params)
            for number in range(load.batch)
        ]
        start_s = time.perf_counter()
        self._submit(requests)
        pieces: dict[str, list[Piece]] = defaultdict(list)
        while self._engine.has_unfinished():
            outputs = self._engine.step()
            now_s = time.perf_counter() - start_s
            for output in outputs:
                if output.finish_reason == "error":
                    raise BenchError(f"the engine failed: {output.error}")
                if output.token_ids:
                    pieces[output.request_id].append(Piece(now_s, len(output.token_ids)))
        return [Answer(load.prompt_tokens, pieces[request.request_id]) for request in requests]

    def _submit(self, requests: list[GenerationRequest]) -> None:
        try:
            for request in requests:
                self._engine.add_request(request)
        except RequestRejected as error:
            _drop(self._engine, requests)
            raise LoadRefused(error.message) from error

    def environment(self) -> dict[str, Any]:
        """Return the engine's facts for the report."""
        info = self._engine.info
        return {
            "model": info.model,
            "parameters": info.parameters,
            "dtype": info.dtype,
            "quantize": info.quantize,
            "device": info.device,
            "device_name": device_name(info.device),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "max_model_len": info.max_model_len,
            "max_sequences": info.max_sequences,
            "kv_tokens": info.kv_tokens,
            "settings": self._settings.model_dump(exclude={"kind", "path"}),
            "spillway": distribution.version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
            "system": platform.platform(terse=True),
        }


def _drop(engine: LLMEngine, requests: list[GenerationRequest]) -> None:
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_unfinished():
        engine.step()


def device_name(device: str) -> str:
    """Return the device's name, such as "AMD EPYC 9B14", or the architecture if it is unknown."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
