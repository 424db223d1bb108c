"""Logits whose masks were not ready when the forward pass was.

They are sampled in a later step, once their masks are ready. Until then their sequences have nothing to compute, and
the batch continues without them. The sampled token is the same as without the delay: masks and random numbers depend
only on the position.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Final

import torch
from torch import Tensor

from engine import scheduler
from engine.scheduler import Chunk
from engine.text.grammar import Matcher

MASKS_WAIT_S: Final = 0.005  # wait of a step for masks, which are nearly always ready before its logits
IDLE_WAIT_S: Final = 0.005  # wait of a step without other work

MatcherOf = Callable[[scheduler.Sequence], Matcher | None]


class DeferredRows:
    """The rows of logits, [V], of sequences that wait for a mask."""

    def __init__(self) -> None:
        self._rows: dict[scheduler.Sequence, tuple[Matcher, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def forget(self, sequence: scheduler.Sequence) -> None:
        """Drop the row of a sequence that has ended."""
        if (late := self._rows.pop(sequence, None)) is not None:
            late[0].discard_mask()

    def exchange(
        self, chunks: Sequence[Chunk], logits: Tensor | None, matcher_of: MatcherOf
    ) -> tuple[list[Chunk], Tensor]:
        """Hold back the rows that must wait, and add those that are ready; return the chunks and logits to sample now.

        `logits` [R, V] has a row for each chunk and for each token of its draft; None: this step computed nothing.
        """
        for sequence in [sequence for sequence in self._rows if sequence.pending_tokens]:
            del self._rows[sequence]  # preempted meanwhile: its tokens, including this one, are computed again
        matchers = [matcher_of(chunk.sequence) for chunk in chunks]
        wait([one.making for one in matchers if one and one.making and not one.family.is_slow], MASKS_WAIT_S)
        ready = self._take_ready(is_idle=logits is None)
        if logits is not None:
            if not ready and all(one is None or one.is_ready for one in matchers):
                return list(chunks), logits
            rows = torch.split(logits, [1 + chunk.draft_tokens for chunk in chunks])
            for chunk, row, matcher in zip(chunks, rows, matchers, strict=True):
                if matcher is None or matcher.is_ready:
                    ready.append((chunk, row))
                else:
                    self._rows[chunk.sequence] = matcher, row[0].clone()
        return [chunk for chunk, _ in ready], torch.cat([row for _, row in ready]) if ready else torch.empty(0)

    def _take_ready(self, *, is_idle: bool) -> list[tuple[Chunk, Tensor]]:
        if is_idle:
            making = [matcher.making for matcher, _ in self._rows.values() if matcher.making is not None]
            wait(making, IDLE_WAIT_S, FIRST_COMPLETED)
        ready = [sequence for sequence, (matcher, _) in self._rows.items() if matcher.is_ready]
        return [(Chunk(sequence, 0), self._rows.pop(sequence)[1][None]) for sequence in ready]
