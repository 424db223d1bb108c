"""Memory figures, read from servers' pages as published."""

import pytest

from pool_worker.engines.formats.memory import MEMORY_PAGES

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",%sengine="0",num_cpu_blocks="None",num_gpu_blocks="573",\
num_gpu_blocks_override="None",sliding_window="None"} 1.0
"""


@pytest.mark.parametrize(
    ("kind", "page", "tokens"),
    [
        ("vllm", VLLM % b"", 573 * 16),
        ("vllm", VLLM % b'kv_cache_size_tokens="9000",', 9000),
        ("vllm", VLLM % b'kv_cache_size_tokens="None",', 573 * 16),
        ("vllm", VLLM % b"" + VLLM % b"", 2 * 573 * 16),  # with data parallelism
        ("vllm", VLLM.replace(b'"573"', b'"None"') % b"", None),
        ("vllm", b"", None),
        ("vllm", b"<html>not found</html>", None),
        ("sglang", b'{"model_path": "m", "max_total_num_tokens": 401408, "max_running_requests": null}', 401_408),
        ("sglang", b'{"model_path": "m"}', None),
        ("sglang", b'{"max_total_num_tokens": 0}', None),
        ("sglang", b'{"max_total_num_tokens": "many"}', None),
        ("sglang", b"[1]", None),
        ("sglang", b"", None),
    ],
)
def test_memory_pages_are_parsed(kind: str, page: bytes, tokens: int | None) -> None:
    assert MEMORY_PAGES[kind].read(page) == tokens
