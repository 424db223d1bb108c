"""The registry of formats by their names in the settings, and their detection from a chat template.

Some have the same names as in vLLM.
"""

from typing import Final

from protocol.dialects.base import ToolFormat
from protocol.dialects.deepseek import CALL as DEEPSEEK_CALL
from protocol.dialects.deepseek import DEEPSEEK_V3, DEEPSEEK_V31, FENCE
from protocol.dialects.glm import GLM
from protocol.dialects.harmony import HarmonyFormat
from protocol.dialects.hermes import HermesFormat
from protocol.dialects.kimi import CALL as KIMI_CALL
from protocol.dialects.kimi import KIMI_K2
from protocol.dialects.llama import LlamaFormat
from protocol.dialects.mistral import ARGS, MistralFormat
from protocol.dialects.qwen_coder import QWEN_CODER
from protocol.dialects.sections import SectionFormat
from protocol.dialects.tagged import TaggedFormat
from protocol.dialects.thinking import Thinking

NONE: Final = "none"
HARMONY: Final = "harmony"
GENERIC: Final = "generic"  # for templates that know no tools: protocol.dialects.generic
_THINK: Final = Thinking("<think>", "</think>")
_GLM: Final = TaggedFormat(GLM)

TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    "hermes": HermesFormat(),
    "llama3_json": LlamaFormat(),
    "mistral": MistralFormat(is_new=True),
    "mistral_list": MistralFormat(is_new=False),
    "qwen3_coder": TaggedFormat(QWEN_CODER),
    "glm45": _GLM,
    "glm47": _GLM,
    "deepseek_v3": SectionFormat(DEEPSEEK_V3),
    "deepseek_v31": SectionFormat(DEEPSEEK_V31),
    "kimi_k2": SectionFormat(KIMI_K2),
    HARMONY: HarmonyFormat(),
    GENERIC: HermesFormat(),
}
REASONING_FORMATS: Final[dict[str, Thinking | None]] = {
    "think": _THINK,
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "kimi_k2": Thinking("<think>", "</think>", ended_by=(*KIMI_K2.opens, KIMI_K2.call)),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    HARMONY: None,  # its tool format parses both
}

# Strings that all occur in a template with this format; the first match wins.
_SIGNATURES: Final = (
    (HARMONY, ("<|channel|>",)),
    ("mistral", ("[TOOL_CALLS]", ARGS)),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("kimi_k2", (KIMI_CALL,)),
    ("deepseek_v3", (DEEPSEEK_CALL, FENCE)),
    ("deepseek_v31", (DEEPSEEK_CALL,)),
    ("glm45", ("<tool_call>", GLM.before_key)),
    ("qwen3_coder", ("<tool_call>", QWEN_CODER.before_name)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    ("llama3_json", ("<|start_header_id|>", "<|python_tag|>")),
)


def tool_parser_of(template: str) -> str:
    """Return the name of the format in which a template writes calls, or "none"."""
    return next((name for name, marks in _SIGNATURES if all(mark in template for mark in marks)), NONE)


def reasoning_parser_of(template: str) -> str:
    """Return the name of the format in which a template writes reasoning, or "none"."""
    if "<|channel|>" in template:
        return HARMONY
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return NONE
    return "kimi_k2" if KIMI_CALL in template else "think"
