"""The two generating calls of the API: what differs between a chat and a plain completion."""

from collections.abc import Iterable
from typing import Any, Protocol

from gateway.api.answers import chat_answer, completion_answer
from gateway.api.schema import GenerationRequest, parse_chat, parse_completion
from gateway.api.sse import ChatChunks, Chunks, CompletionChunks
from gateway.tokens.model_tokens import ModelTokens
from protocol.messages import Tokens


class Call(Protocol):
    """One validated request body and the form of its answer."""

    name: str  # as in RequestRecord.endpoint
    prompt_param: str  # the field that holds the prompt
    usual_max_tokens: int | None  # OpenAI's default for this endpoint; None: what the context leaves

    @property
    def request(self) -> GenerationRequest:
        """The body."""
        ...

    @property
    def message_count(self) -> int:
        """How many messages it holds."""
        ...

    async def encode_prompt(self, tokens: ModelTokens) -> list[int]:
        """Token ids of the prompt. Raises InvalidParameter."""
        ...

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """What makes the events of a streamed answer."""
        ...

    def whole(self, answer_id: str, created: int, frames: Iterable[Tokens], usage: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class ChatCall:
    """POST /v1/chat/completions."""

    name = "chat.completions"
    prompt_param = "messages"
    usual_max_tokens: int | None = None

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_chat(body)

    @property
    def message_count(self) -> int:
        """See Call."""
        return len(self.request.messages)

    async def encode_prompt(self, tokens: ModelTokens) -> list[int]:
        """See Call."""
        messages = [message.for_template() for message in self.request.messages]
        return await tokens.encode_chat(messages, variables=self.request.chat_template_kwargs)

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """See Call."""
        request = self.request
        return ChatChunks(
            f"chatcmpl-{answer_id}",
            created,
            request.model,
            choices=request.n or 1,
            with_usage=request.include_usage,
        )

    def whole(self, answer_id: str, created: int, frames: Iterable[Tokens], usage: dict[str, Any]) -> bytes:
        """See Call."""
        choices = self.request.n or 1
        return chat_answer(f"chatcmpl-{answer_id}", created, self.request.model, frames, choices=choices, usage=usage)


class CompletionCall:
    """POST /v1/completions."""

    name = "completions"
    prompt_param = "prompt"
    usual_max_tokens: int | None = 16
    message_count = 0

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_completion(body)
        self._echo = ""

    async def encode_prompt(self, tokens: ModelTokens) -> list[int]:
        """See Call."""
        prompt = self.request.prompt
        if isinstance(prompt, str):
            self._echo = prompt if self.request.echo else ""
            return await tokens.encode_text(prompt, add_special_tokens=self.request.add_special_tokens)
        self._echo = await tokens.decode(prompt) if self.request.echo else ""
        return prompt

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """See Call."""
        request = self.request
        return CompletionChunks(
            f"cmpl-{answer_id}",
            created,
            request.model,
            choices=request.n or 1,
            with_usage=request.include_usage,
            echo=self._echo,
        )

    def whole(self, answer_id: str, created: int, frames: Iterable[Tokens], usage: dict[str, Any]) -> bytes:
        """See Call."""
        return completion_answer(
            f"cmpl-{answer_id}",
            created,
            self.request.model,
            frames,
            choices=self.request.n or 1,
            usage=usage,
            echo=self._echo,
        )
