"""What is asked of a model's output, and what is told of it besides text."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

# --- grammar ----------------------------------------------------------------------------------------------------------
#
# Constraints that clients may put on an answer's form.


class Grammar(Struct, frozen=True, omit_defaults=True):
    """The form that every answer must have."""

    kind: str  # "json_schema" | "json_object" | "regex" | "lark"
    source: str  # empty for json_object
    field: str = "response_format"  # of the request: who asked for it, for errors
    is_optional: bool = False  # nobody asked for it: an engine that cannot follow it goes without


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
    stop: tuple[str, ...] = ()  # strings that end a choice where its content has one; not part of its text
    stop_token_ids: tuple[int, ...] = ()  # token ids that end a choice, beside the model's own
    max_tokens: int = 16  # output tokens of one choice, the resumed ones included; 0: only the prompt is computed
    min_tokens: int = 0  # no stop of any kind before so many output tokens
    ignore_eos: bool = False  # the model's own end-of-text tokens do not end a choice
    logprobs: int | None = None  # None: none; k: of the chosen token and of the k most probable (k may be 0)
    prompt_logprobs: int | None = None  # likewise of each prompt token, once per request
    skip_special_tokens: bool = True  # special tokens leave no text
    allowed_token_ids: tuple[int, ...] = ()  # no other tokens may be sampled; empty: any
    bad_words: tuple[str, ...] = ()  # must not be in the output
    include_stop_str_in_output: bool = False  # what ended a choice is part of its text after all
    grammar: Grammar | None = None  # every answer follows it; one that is complete ends


# --- logprobs ---------------------------------------------------------------------------------------------------------
#
# Log-probabilities of an answer's and a prompt's tokens, on their way to a gateway.


class PromptLogprob(Struct, frozen=True, array_like=True):
    """One prompt token under the raw distribution after those before it."""

    token_id: int
    text: str  # U+FFFD where the token is not whole characters
    logprob: float | None = None  # None for the first token, before which there is nothing
    rank: int | None = None  # 1 + how many tokens are likelier
    top: tuple[tuple[int, str, float], ...] = ()  # (token_id, text, logprob), likeliest first


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log-probability of one token under the raw distribution, before any sampling processor."""

    token_id: int
    text: str
    logprob: float
    utf8: bytes  # the token's own bytes (its text may be a replacement character)
    top: tuple[tuple[int, str, float, bytes], ...] = ()  # (token_id, text, logprob, utf8), likeliest first


# --- pooling ----------------------------------------------------------------------------------------------------------
#
# Jobs that want vectors instead of text: embeddings, and scores of pairs of texts.


class Pooling(Struct, frozen=True, omit_defaults=True):
    """Several inputs in one job, each answered by one vector: its embedding, or the one score of a pair of texts.

    An input is numbered like a choice. One that is answered comes back as a ResumePoint with a finish reason.
    """

    task: str  # "embed" | "score"
    lengths: bytes  # tokens of each input, packed like token ids; the prompt holds the inputs one after the other
    first_lengths: bytes = b""  # likewise: how many of them are of a pair's first text (token type 0); empty: all
    dimensions: int | None = None  # keep so many leading components, normalised again where all are

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return len(self.lengths) // 4


class PoolingCard(Struct, frozen=True, omit_defaults=True):
    """The output of a model that pools: what it returns for each input instead of text."""

    task: str  # "embed" | "score"
    dimensions: int  # components of a vector
    is_matryoshka: bool = False  # trained so that the leading components of a vector are a vector too
    matryoshka_dimensions: tuple[int, ...] = ()  # how many of them; empty: any number


# --- sampling defaults ------------------------------------------------------------------------------------------------
#
# A model's own sampling parameters: what its ``generation_config.json`` says, as vLLM reads it.

GENERATION_CONFIG: Final = "generation_config.json"
# Each parameter with its least and largest value, as requests may have them (``gateway.api.schema``).
_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**32 - 1),  # 0 and -1: off
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 100),
}
SAMPLING_DEFAULTS: Final = frozenset(_BOUNDS)


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters of a generation config, less those out of range.

    Other parameters of the file are not read. ``do_sample`` is not either: vLLM samples whatever it says.
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
