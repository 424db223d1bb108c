"""The scripted engine's language: a tokenizer built in code, and answers computed from the prompt.

The vocabulary is the 256 bytes, one token per common word with its leading space, and the prefixes of those words:
every merge extends a prefix by one letter, so a word is always one token, in any context.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.types import Candidate
from protocol.generation import TokenLogprob
from protocol.job import pack_token_ids

_WORD_LIST: Final = (
    "a about after again all also always an and any are as at back be because been before begin better between both "
    "but by call can case change clear close come could count day did do does down each end enough even every far "
    "fast few find first follow for from full get give go good great had has have he head help here high his hold "
    "how if in into is it its job just keep kind know large last late lead left less let level light like line "
    "little long look made make many may mean might more most move much must name near need never new next no not "
    "now number of off often old on once one only open or order other our out over own part pass path place plan "
    "point pool put queue quick rate reach read rest right round run same say see send set she should show side "
    "since slow small so some soon start state step still stop stream such sure take tell than that the their them "
    "then there these they thing this those three through time to token too turn two under until up us use very "
    "wait want was water way we well went were what when where which while who why will with word work would year "
    "yes yet you your"
)
WORDS: Final = tuple(_WORD_LIST.split())
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORTEST_ANSWER: Final = 16  # tokens
LONGEST_ANSWER: Final = 96
_SPACE: Final = "Ġ"  # how the byte-level alphabet writes a space
_SENTENCE_TOKENS: Final = 12  # one token in so many is a full stop
_MASK: Final = (1 << 64) - 1


def build_tokenizer(further_token: str = "") -> Tokenizer:
    """Build the tokenizer; it is always the same except for ``further_token``."""
    vocabulary = {letter: id_ for id_, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        beginning = _SPACE
        for letter in word:
            if beginning + letter not in vocabulary:
                vocabulary[beginning + letter] = len(vocabulary)
                merges.append((beginning, letter))
            beginning += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (*SPECIAL_TOKENS, further_token) if further_token else SPECIAL_TOKENS
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


class Script:
    """The deterministic token sequences of all answers."""

    def __init__(self, tokenizer: Tokenizer, revision: str = "") -> None:
        self.tokenizer = tokenizer
        self._salt = revision.encode()
        ids = tokenizer.get_vocab()
        self._word_ids = [ids[_SPACE + word] for word in WORDS]
        self._stop_id = ids["."]
        self.vocabulary_size: int = tokenizer.get_vocab_size()
        self.end_of_text_id: int = ids[SPECIAL_TOKENS[0]]

    @cached_property
    def text_of(self) -> dict[int, str]:
        """The text of every token that an answer may contain."""
        return {id_: self.tokenizer.decode([id_]) for id_ in (*self._word_ids, self._stop_id)}

    def answer_seed(self, prompt_ids: Sequence[int], choice: int) -> int:
        """Return the seed of an answer: it depends only on the prompt, the choice's index and the revision."""
        reported = self._salt + pack_token_ids(prompt_ids)
        digest = hashlib.blake2b(reported, digest_size=8, person=b"%d" % choice).digest()
        return int.from_bytes(digest, "little")

    def answer_tokens(self, seed: int) -> int:
        """Return the length of the whole answer."""
        return SHORTEST_ANSWER + seed % (LONGEST_ANSWER - SHORTEST_ANSWER + 1)

    def token_at(self, seed: int, place: int) -> int:
        """Return the token at a position of an answer, counted from 0."""
        if place % _SENTENCE_TOKENS == _SENTENCE_TOKENS - 1:
            return self._stop_id
        return self._word_ids[_mixed(seed + place) % len(self._word_ids)]

    def logprob_at(self, seed: int, place: int, alternatives: int) -> TokenLogprob:
        """Invent the log-probability of one token and of its likeliest alternatives, starting with itself."""
        chosen = self.token_at(seed, place)
        likelihood = -((_mixed(seed - place) % 1000) + 1) / 1000
        others = islice((id_ for id_ in self._word_ids if id_ != chosen), max(0, alternatives - 1))
        top = [self._candidate(chosen, likelihood)] + [
            self._candidate(id_, likelihood - 1.0 - rank) for rank, id_ in enumerate(others)
        ]
        text = self.text_of[chosen]
        return TokenLogprob(chosen, text, likelihood, text.encode(), tuple(top[:alternatives]))

    def _candidate(self, token_id: int, logprob: float) -> Candidate:
        text = self.text_of[token_id]
        return token_id, text, logprob, text.encode()


def _mixed(number: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64)."""
    number = (number * 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
