"""One choice of a request, from tokens to text: stop conditions, detokenization, resumption."""

from dataclasses import dataclass
from typing import Final

import torch

from engine.sampler import BadWords, RawLogprobs, RawPromptLogprob, SamplingRow
from engine.scheduler import Sequence
from engine.text.detokenizer import TokenText
from engine.text.grammar import Matcher
from engine.text.output_text import OutputText
from engine.types import Candidate, FinishReason, GenerationRequest, ResumePoint, SequenceOutput
from protocol.generation import PromptLogprob, SamplingParams, TokenLogprob

# --- drafts -----------------------------------------------------------------------------------------------------------
#
# Drafts the next tokens from the sequence's own text (n-gram speculation).
#
# Where the last tokens occurred before, the tokens that followed then may follow again: quotations, code, lists. A
# draft is computed beside the next token, and every draft token that the sampler then chooses saves one step. The rest
# is discarded, so drafts never change the answer. As in vLLM's n-gram method and in prompt lookup decoding
# (https://github.com/apoorvumang/prompt-lookup-decoding).

NGRAM_TOKENS: Final = 3  # number of last tokens that must have occurred before
PAUSE_TOKENS: Final = 16  # after a draft without a single right token, skip drafts for this many tokens


class NgramDrafts:
    """The drafts for one sequence."""

    def __init__(self, token_ids: list[int], max_tokens: int) -> None:
        """Follow `token_ids` as it grows; draft at most `max_tokens` at a time."""
        self._token_ids = token_ids
        self._max_tokens = max_tokens
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → the index after its previous occurrence
        self._read_tokens = NGRAM_TOKENS - 1  # number of tokens whose n-grams are indexed; the last n-gram is not
        self._pause_until = 0  # tokens

    def guess(self, max_tokens: int) -> list[int]:
        """Return a draft of the next tokens, at most `max_tokens`; empty if the last n-gram is new."""
        tokens = self._token_ids
        while self._read_tokens < len(tokens) - 1:
            self._read_tokens += 1
            self._after[tuple(tokens[self._read_tokens - NGRAM_TOKENS : self._read_tokens])] = self._read_tokens
        if len(tokens) < max(NGRAM_TOKENS, self._pause_until):
            return []
        start = self._after.get(tuple(tokens[-NGRAM_TOKENS:]))
        return [] if start is None else tokens[start : start + min(self._max_tokens, max_tokens)]

    def record_result(self, guessed: int, right: int) -> None:
        """Record how many of the draft tokens were right."""
        if guessed and not right:
            self._pause_until = len(self._token_ids) + PAUSE_TOKENS


# --- choice -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Choice:
    """Choice `index` of a request: its sequence, its row in the sampler, and the state of its text.

    open ──stop token, stop string, grammar complete, max_tokens──> finished
    """

    request_id: str
    index: int
    params: SamplingParams
    sequence: Sequence
    sampling_row: SamplingRow
    tokens: TokenText
    text: OutputText
    matcher: Matcher | None  # of its grammar
    drafts: NgramDrafts | None
    prompt_error: str | None = None  # why its prompt has no logprobs

    @classmethod
    def start(
        cls,
        request: GenerationRequest,
        index: int,
        eos_ids: frozenset[int],
        tokens: TokenText,
        *,
        vocab_size: int,
        matcher: Matcher | None,
        draft_tokens: int,
        device: torch.device,
    ) -> "Choice":
        """Create a choice of a checked request, resumed if the request asks for it; its logits will be on `device`."""
        params = request.sampling
        resume = next((point for point in request.resume if point.index == index), ResumePoint(index, (), 0))
        sequence = Sequence(
            token_ids=[*request.prompt_ids, *resume.token_ids],
            prompt_tokens=len(request.prompt_ids),
            max_total_tokens=len(request.prompt_ids) + params.max_tokens,
            scored_tokens=None if params.prompt_logprobs is None or index else request.scored_tokens,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
        )
        eos_ids = frozenset() if params.ignore_eos else eos_ids
        detokenizer = tokens.detokenizer(request.prompt_ids, skip_special_tokens=params.skip_special_tokens)
        row = SamplingRow(
            params,
            index,
            sequence,
            eos_ids | frozenset(params.stop_token_ids),
            vocab_size,
            matcher=matcher,
            device=device,
            bad_words=BadWords(params.bad_words, tokens.ids_of) if params.bad_words else None,
        )
        return cls(
            request_id=request.request_id,
            index=index,
            params=params,
            sequence=sequence,
            sampling_row=row,
            tokens=tokens,
            text=OutputText(params, eos_ids, detokenizer, resume.text_chars, request.content_finder),
            matcher=matcher,
            # Processors depend on the previous token: only plain rows can be sampled ahead.
            drafts=NgramDrafts(sequence.token_ids, draft_tokens) if draft_tokens and row.is_plain else None,
        )

    def replay(self) -> SequenceOutput | None:
        """Rebuild the text state from resumed tokens; return the output that the client has not received, if any."""
        text = ""
        for token_id in self.sequence.token_ids[self.sequence.prompt_tokens :]:
            text += self._read(token_id)
            if self.text.finish_reason is not None:
                break
        return self._output([], text, None) if text or self.text.finish_reason else None

    def advance(self, token_id: int, logprobs: RawLogprobs | None) -> SequenceOutput:
        """Append a sampled token; return this step's output for the choice."""
        self.sequence.token_ids.append(token_id)
        text = self._read(token_id)
        return self._output([token_id], text, None if logprobs is None else [self._describe(token_id, logprobs)])

    def score(self, raw: list[RawPromptLogprob]) -> SequenceOutput:
        """Record the logprobs of its prompt's next tokens; return this step's output for the prompt."""
        sequence = self.sequence
        done = sequence.scored_tokens or 0
        scores: list[PromptLogprob] = []
        if done == 0:
            scores.append(
                PromptLogprob(sequence.token_ids[0], self.tokens.text_of(sequence.token_ids[0]), None, None, ())
            )
        token_ids = sequence.token_ids[max(1, done) : max(1, done) + len(raw)]
        for token_id, score in zip(token_ids, raw, strict=True):
            top = tuple((id_, self.tokens.text_of(id_), logprob) for id_, logprob in score.top)
            scores.append(PromptLogprob(token_id, self.tokens.text_of(token_id), score.logprob, score.rank, top))
        sequence.scored_tokens = done + len(scores)
        output = self._output([], "", None)
        output.prompt_logprobs = scores
        return output

    def guess(self) -> None:
        """Set its sequence's draft, if drafts are enabled and the sequence is about to yield a token."""
        self.sequence.draft = []
        if self.drafts is not None and self.sequence.pending_tokens == 1:
            room = self.sequence.max_total_tokens - len(self.sequence.token_ids) - 1
            self.sequence.draft = self.drafts.guess(room)

    def end(self, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """End the choice without a token."""
        self.text.finish_reason = reason
        output = self._output([], "", None)
        output.error = error
        output.timings = self.sequence.clock.timings()
        return output

    def _output(self, token_ids: list[int], text: str, logprobs: list[TokenLogprob] | None) -> SequenceOutput:
        clock = self.sequence.clock
        has_ended = self.text.finish_reason is not None and clock.scheduled_s is not None  # else by resumed text
        return SequenceOutput(
            self.request_id,
            self.index,
            token_ids,
            text,
            logprobs,
            self.text.finish_reason,
            self.text.stop_reason,
            cached_tokens=self.sequence.cached_tokens or 0,
            timings=clock.timings() if has_ended or clock.has_first_token else None,
        )

    def _read(self, token_id: int) -> str:
        """Append one output token to the text state; return new text for the client."""
        matcher = self.matcher
        if matcher is None:
            return self.text.read(token_id)
        matcher.consume(token_id)
        return self.text.read(token_id, is_complete=matcher.is_complete)

    def _describe(self, token_id: int, raw: RawLogprobs) -> TokenLogprob:
        def named(id_: int, logprob: float) -> Candidate:
            return id_, self.tokens.text_of(id_), logprob, self.tokens.bytes_of(id_)

        _, text, logprob, token_bytes = named(token_id, raw.logprob)
        return TokenLogprob(token_id, text, logprob, token_bytes, tuple(named(*entry) for entry in raw.top))
