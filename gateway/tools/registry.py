"""All formats by the names that settings call them, and which of them a chat template speaks.

Some go by the names that vLLM has for them too.
"""

from typing import Final

from gateway.tools.base import ToolFormat
from gateway.tools.harmony import HarmonyFormat
from gateway.tools.hermes import HermesFormat
from gateway.tools.llama import LlamaFormat
from gateway.tools.mistral import ARGS, MistralFormat
from gateway.tools.qwen_coder import QwenCoderFormat
from gateway.tools.thinking import Thinking

NONE: Final = "none"
HARMONY: Final = "harmony"
_THINK: Final = Thinking("<think>", "</think>")

TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    "hermes": HermesFormat(),
    "llama3_json": LlamaFormat(),
    "mistral": MistralFormat(is_new=True),
    "mistral_list": MistralFormat(is_new=False),
    "qwen3_coder": QwenCoderFormat(),
    HARMONY: HarmonyFormat(),
}
REASONING_FORMATS: Final[dict[str, Thinking | None]] = {
    "think": _THINK,
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "mistral": Thinking("[THINK]", "[/THINK]"),
    HARMONY: None,  # its tool format reads both
}


def tool_parser_of(template: str) -> str:
    """The name of the format in which a template writes calls, or "none"."""
    if "<|channel|>" in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return "mistral" if ARGS in template else "mistral_list"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "<|start_header_id|>" in template and ('"parameters": ' in template or "<|python_tag|>" in template):
        return "llama3_json"
    return NONE


def reasoning_parser_of(template: str) -> str:
    """The name of the format in which a template writes reasoning, or "none"."""
    if "<|channel|>" in template:
        return HARMONY
    if "[THINK]" in template:
        return "mistral"
    return "think" if "</think>" in template else NONE
