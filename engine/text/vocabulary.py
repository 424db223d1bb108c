"""One tokenizer's tokens: their text, those that end an answer, and grammars over them."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.text.detokenizer import TokenText
from engine.text.grammar import GrammarCompiler


class Vocabulary:
    """The vocabulary of the model, or of an adapter with its own tokenizer, which may name another end token."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.tokens = TokenText(tokenizer)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.grammars = GrammarCompiler(tokenizer, model.config.get_text_config().vocab_size, self.eos_token_ids)

    def of_adapter(self, own: PreTrainedTokenizerBase | None) -> "Vocabulary":
        """Return the vocabulary of an adapter: this one, unless the adapter's tokenizer differs."""
        return self if own is None or _are_equivalent(own, self._tokenizer) else Vocabulary(self._model, own)


def _are_equivalent(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    # Trainers save the base's tokenizer with every adapter; a copy for each would take much memory.
    if not (one.is_fast and other.is_fast) or one.special_tokens_map != other.special_tokens_map:
        return False
    return bool(one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str())


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = model.config.get_text_config().eos_token_id
    ids = set(declared) if isinstance(declared, list | tuple) else {declared}
    return tuple(sorted(int(id_) for id_ in ids | {tokenizer.eos_token_id} if id_ is not None))
