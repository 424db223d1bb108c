"""Parameters of a model's output, and its data besides text."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

# --- grammar ----------------------------------------------------------------------------------------------------------
#
# Constraints on the form of an answer.


class Grammar(Struct, frozen=True, omit_defaults=True):
    """The form that every answer must have."""

    kind: str  # "json_schema" | "json_object" | "regex" | "lark"
    source: str  # empty for json_object
    field: str = "response_format"  # the request's field that set it, for errors
    is_optional: bool = False  # not requested by the client: an engine may ignore it


# --- sampling ---------------------------------------------------------------------------------------------------------


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """Sampling parameters and stop conditions. Names and defaults are those of the OpenAI API and, beyond it, vLLM."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches this; 1 = off
    top_k: int = 0  # keep the k most probable tokens; 0 = off
    min_p: float = 0.0  # keep tokens at least this probable relative to the most probable one; 0 = off
    presence_penalty: float = 0.0  # subtracted once from the logit of every token already produced
    frequency_penalty: float = 0.0  # subtracted per occurrence among the tokens already produced
    # Divides (or multiplies, if negative) the logits of tokens in prompt or output; 1 = off.
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # token id → added to its logit
    seed: int | None = None  # same seed, prompt and parameters: same output; None: random
    n: int = 1  # choices per request
    stop: tuple[str, ...] = ()  # strings that end a choice when its content contains one; not part of its text
    stop_token_ids: tuple[int, ...] = ()  # token ids that end a choice, in addition to the model's own
    max_tokens: int = 16  # output tokens of one choice, including resumed ones; 0: compute only the prompt
    min_tokens: int = 0  # a choice does not end before this many output tokens
    ignore_eos: bool = False  # the model's own end-of-text tokens do not end a choice
    logprobs: int | None = None  # None: none; k: of the chosen token and of the k most probable (k may be 0)
    prompt_logprobs: int | None = None  # the same for each prompt token, once per request
    skip_special_tokens: bool = True  # special tokens produce no text
    allowed_token_ids: tuple[int, ...] = ()  # no other tokens may be sampled; empty: any
    bad_words: tuple[str, ...] = ()  # must not appear in the output
    include_stop_str_in_output: bool = False  # the stop string is part of the text
    grammar: Grammar | None = None  # every answer must match it, and ends when complete


# --- logprobs ---------------------------------------------------------------------------------------------------------
#
# Log-probabilities of answer and prompt tokens, as sent to gateways.


class PromptLogprob(Struct, frozen=True, array_like=True):
    """The log-probability of one prompt token under the raw distribution, given those before it."""

    token_id: int
    text: str  # with U+FFFD for incomplete characters
    logprob: float | None = None  # None for the first token
    rank: int | None = None  # 1 + the number of likelier tokens
    top: tuple[tuple[int, str, float], ...] = ()  # (token_id, text, logprob), likeliest first


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log-probability of one token under the raw distribution, before any sampling processor."""

    token_id: int
    text: str
    logprob: float
    utf8: bytes  # the token's bytes (its text may be a replacement character)
    top: tuple[tuple[int, str, float, bytes], ...] = ()  # (token_id, text, logprob, utf8), likeliest first


# --- pooling ----------------------------------------------------------------------------------------------------------
#
# Jobs for vectors instead of text: embeddings, and scores of pairs of texts.


class Pooling(Struct, frozen=True, omit_defaults=True):
    """Several inputs in one job, each answered by one vector: its embedding, or the single score of a pair of texts.

    An input is numbered like a choice. A later attempt gets an answered one as a ResumePoint with a finish reason.
    """

    task: str  # "embed" | "score"
    lengths: bytes  # tokens of each input, packed like token ids; the prompt holds the inputs one after the other
    # Packed likewise: how many of them belong to a pair's first text (token type 0). Empty: all.
    first_lengths: bytes = b""
    dimensions: int | None = None  # keep this many leading components, normalized again if the full vector is

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return len(self.lengths) // 4


class PoolingCard(Struct, frozen=True, omit_defaults=True):
    """The output of a pooling model for each input."""

    task: str  # "embed" | "score"
    dimensions: int  # components of a vector
    is_matryoshka: bool = False  # trained so that the leading components are a usable vector
    matryoshka_dimensions: tuple[int, ...] = ()  # allowed numbers of components; empty: any


# --- sampling defaults ------------------------------------------------------------------------------------------------
#
# A model's own sampling parameters from its ``generation_config.json``, as vLLM reads it.

GENERATION_CONFIG: Final = "generation_config.json"
# Smallest and largest value of each parameter, as in requests (``gateway.api.schema``).
_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**32 - 1),  # 0 and -1: off
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 100),
}
SAMPLING_DEFAULTS: Final = frozenset(_BOUNDS)


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters of a generation config, without those out of range.

    Other parameters of the file are ignored, including ``do_sample``, as vLLM does.
    """
    found = {}
    for name, (least, most) in _BOUNDS.items():
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            found[name] = value
    if "top_k" in found:
        top_k = int(found.pop("top_k"))
        found |= {"top_k": top_k} if top_k > 0 else {}
    return found
