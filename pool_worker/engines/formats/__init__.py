"""Registry of the wire formats of inference servers that take token ids or text."""

from typing import Final

from pool_worker.engines.formats.base import WireFormat
from pool_worker.engines.formats.llamacpp import LlamaCppFormat
from pool_worker.engines.formats.lmdeploy import LMDeployFormat
from pool_worker.engines.formats.ollama import OllamaFormat
from pool_worker.engines.formats.openai_completions import OpenAICompletionsFormat
from pool_worker.engines.formats.sglang import SGLangFormat
from pool_worker.engines.formats.tgi import TgiFormat
from pool_worker.engines.formats.triton import TritonFormat
from pool_worker.engines.formats.trtllm import TrtLlmFormat
from pool_worker.engines.formats.vllm import VllmFormat

FORMATS: Final[dict[str, type[WireFormat]]] = {
    "vllm": VllmFormat,
    "llamacpp": LlamaCppFormat,
    "sglang": SGLangFormat,
    "lmdeploy": LMDeployFormat,
    "trtllm": TrtLlmFormat,
    "tgi": TgiFormat,
    "ollama": OllamaFormat,
    "triton": TritonFormat,
    "openai_completions": OpenAICompletionsFormat,
}
