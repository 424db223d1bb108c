"""Somebody else's API as vLLM publishes its wire format, which makes the scripted engine's answers and sends bills."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scripted_answers import ScriptedAnswers
from pool_worker.engines.scripted_words import CHAT_TEMPLATE, SPECIAL_TOKENS, Script, build_tokenizer
from tests.conformance.replay import Replay, running
from tests.conformance.replay_events import sse

BEGIN_OF_TURN = SPECIAL_TOKENS[1]


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost of one call, and its prompt."""

    prompt: str  # the user's message
    prompt_tokens: int  # as sent, what another had made of the answer included
    completion_tokens: int  # as sent back


@dataclass
class HostedApi(Replay):
    """``bills`` has one entry for each call that has ended, cut off or not."""

    kind: str = "vllm"
    bills: list[Bill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokenizer = build_tokenizer()
        self._script = Script(self._tokenizer)
        begin_id = self._tokenizer.token_to_id(BEGIN_OF_TURN)
        assert begin_id is not None
        self._begin_id = begin_id
        self._head = len(ScriptedAnswers().token_ids(f"{BEGIN_OF_TURN}assistant\n"))  # of the answer

    async def answer(self, body: Mapping[str, Any]) -> AsyncIterator[str | bytes]:
        """Implement ``Replay``."""
        prompt, tokens = self.made_for(body)
        sent = 0
        try:
            async for event in self._paced(self.events_of(body, tokens)):
                sent = min(sent + 1, len(tokens))
                yield event
        finally:
            self.bills.append(Bill(prompt, len(body["prompt"]), sent))

    def is_question(self, body: Mapping[str, Any]) -> bool:
        """Return whether a user asks; a worker may, too."""
        return self._begin_id in body["prompt"]

    def made_for(self, body: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Return the user's message, and the tokens that are asked for."""
        given: list[int] = body["prompt"]
        own_tokens = len(given) - given[::-1].index(self._begin_id) - 1 + self._head  # without what is made already
        seed = self._script.answer_seed(given[:own_tokens], 0)
        place, end = len(given) - own_tokens, len(given) - own_tokens + body["max_tokens"]
        return self._user(given[:own_tokens]), [self._script.token_at(seed, at) for at in range(place, end)]

    @staticmethod
    def events_of(body: Mapping[str, Any], tokens: Sequence[int]) -> list[str]:
        """Return the events of an answer."""
        return _events(len(body["prompt"]), tokens)

    def _user(self, prompt_ids: Sequence[int]) -> str:
        whole = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        turns = [turn.removesuffix("\n").removesuffix(SPECIAL_TOKENS[2]) for turn in whole.split(BEGIN_OF_TURN)]
        return next(turn.removeprefix("user\n") for turn in turns if turn.startswith("user\n"))


def _events(prompt_tokens: int, tokens: Sequence[int]) -> list[str]:
    events = []
    for place, token_id in enumerate(tokens):
        reason = "length" if place + 1 == len(tokens) else None
        choice = {"index": 0, "text": "", "token_ids": [token_id], "logprobs": None, "finish_reason": reason}
        events.append(sse({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None}))
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(tokens), "prompt_tokens_details": None}
    return [*events, sse({"id": "cmpl-1", "choices": [], "usage": usage}), "data: [DONE]\n\n"]


@contextlib.contextmanager
def hosted_api(folder: Path, token_s: float) -> Iterator[tuple[HostedApi, Path]]:
    """Let one run; returns it with a folder that has the model's tokenizer."""
    prepare_tokenizer(folder)
    with running(HostedApi(token_s=token_s)) as api:
        yield api, folder


def prepare_tokenizer(folder: Path) -> None:
    """Write the model's tokenizer into a new folder."""
    folder.mkdir()
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
