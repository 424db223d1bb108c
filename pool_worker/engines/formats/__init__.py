"""Wire formats of inference servers that take and give token ids: the registry."""

from typing import Final

from pool_worker.engines.formats.base import WireFormat
from pool_worker.engines.formats.llamacpp import LlamaCppFormat
from pool_worker.engines.formats.sglang import SGLangFormat
from pool_worker.engines.formats.vllm import VllmFormat

FORMATS: Final[dict[str, type[WireFormat]]] = {
    "vllm": VllmFormat,
    "llamacpp": LlamaCppFormat,
    "sglang": SGLangFormat,
}
