"""How a server's tokenizer encodes a sample text, for servers that offer this: it reveals a changed tokenizer.

vLLM, SGLang, llama.cpp and TGI have ``/tokenize``, each with its own fields; LMDeploy has ``/v1/encode``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import ids
from pool_worker.engines.framing import MalformedEvent
from protocol.wire import UNDECODABLE

SAMPLE: Final = "Spillways 2026: naïve Ñandús, 你好, мир!\n\tdef f(x): return x"


@dataclass(frozen=True, slots=True)
class TokenizerPage:
    """The page that encodes a text, and its fields."""

    path: str  # POST
    body: Callable[[str], dict[str, Any]]  # field of the model's name
    field: str | None  # field of the ids in the answer; None: the answer is a list of tokens with an id each

    def sample_of(self, page: bytes) -> str | None:
        """Return the ids in an answer as text; None if there are none."""
        try:
            answer = msgspec.json.decode(page)
            token_ids = [one["id"] for one in answer] if self.field is None else answer[self.field]
            return " ".join(map(str, ids(token_ids, "tokens"))) or None
        except (*UNDECODABLE, MalformedEvent, TypeError, KeyError):
            return None


def _by_prompt(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": SAMPLE, "add_special_tokens": False}


TOKENIZER_PAGES: Final[Mapping[str, TokenizerPage]] = {
    "vllm": TokenizerPage("/tokenize", _by_prompt, "tokens"),
    "sglang": TokenizerPage("/tokenize", _by_prompt, "tokens"),
    "llamacpp": TokenizerPage("/tokenize", lambda _model: {"content": SAMPLE}, "tokens"),
    "tgi": TokenizerPage("/tokenize", lambda _model: {"inputs": SAMPLE}, None),
    "lmdeploy": TokenizerPage("/v1/encode", lambda _model: {"input": SAMPLE}, "input_ids"),
}
