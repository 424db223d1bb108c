"""The scripted engine's undisturbed answers, computed from the prompt without running the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tokenizing.templates import ChatTemplate
from pool_worker.engines.scripted_words import CHAT_TEMPLATE, Script, build_tokenizer


class ScriptedAnswers:
    """Renders and encodes chats as Spillway does for this engine, and computes their answers."""

    def __init__(self) -> None:
        self._template = ChatTemplate(CHAT_TEMPLATE, {})
        self._tokenizer = build_tokenizer()
        self._script = Script(self._tokenizer)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a chat."""
        return self.token_ids(self._template.render(messages))

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, prompt: str, tokens: int) -> str:
        """Return the first ``tokens`` tokens of the answer to a single user message."""
        seed = self._script.answer_seed(self.prompt_ids([{"role": "user", "content": prompt}]), 0)
        return "".join(self._script.text_of[self._script.token_at(seed, place)] for place in range(tokens))
