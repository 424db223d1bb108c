"""The number of tokens that a server's memory holds, for servers that report it on a separate page.

vLLM: the metric ``vllm:cache_config_info`` (https://docs.vllm.ai/en/latest/usage/metrics.html). SGLang:
``/get_server_info`` (https://docs.sglang.ai/basic_usage/native_api.html).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import limit
from protocol.wire import UNDECODABLE

_VLLM_CACHE: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_VLLM_LABEL: Final = re.compile(rb'(kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d+)"')


@dataclass(frozen=True, slots=True)
class MemoryPage:
    """The page on which a server reports it, and a parser of that page, which returns None if the number is missing."""

    path: str
    read: Callable[[bytes], int | None]


def _vllm(page: bytes) -> int | None:
    """Return the sum over the engines of one server: with data parallelism it has several."""
    total = 0
    for labels in _VLLM_CACHE.findall(page):
        fields = {name: int(value) for name, value in _VLLM_LABEL.findall(labels)}
        total += fields.get(b"kv_cache_size_tokens") or fields.get(b"num_gpu_blocks", 0) * fields.get(b"block_size", 0)
    return limit(total)


def _sglang(page: bytes) -> int | None:
    try:
        reported = msgspec.json.decode(page, type=dict[str, Any]).get("max_total_num_tokens")
    except UNDECODABLE:
        return None
    return limit(reported)


MEMORY_PAGES: Final[Mapping[str, MemoryPage]] = {
    "vllm": MemoryPage("/metrics", _vllm),
    "sglang": MemoryPage("/get_server_info", _sglang),
}
