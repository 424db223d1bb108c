"""A plugin of pytest: all tests of a run, in one event loop, share one AsyncLLM, which takes half a minute to start."""

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

_start = AsyncLLM.from_engine_args
_end = AsyncLLM.shutdown
_kept: list[AsyncLLM] = []


def _kept_engine(arguments: AsyncEngineArgs) -> AsyncLLM:
    if not _kept:
        _kept.append(_start(arguments))
    return _kept[0]


def pytest_configure(config: pytest.Config) -> None:
    AsyncLLM.from_engine_args = _kept_engine
    AsyncLLM.shutdown = lambda engine, timeout=None: None


def pytest_unconfigure(config: pytest.Config) -> None:
    for engine in _kept:
        _end(engine)
