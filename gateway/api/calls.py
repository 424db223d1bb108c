"""The generating calls of the API: chat completions and completions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, Protocol, Self, TypeVar

from msgspec.structs import replace

from gateway.api.answers import (
    ChoiceContent,
    CompleteAnswer,
    CompletionRows,
    chat_answer,
    choice_object,
    completion_answer,
    completion_rows,
    gather,
)
from gateway.api.call import JobCall
from gateway.api.events import (
    ChatChunks,
    CheckedChunks,
    CompletionChunks,
    ParsedChatChunks,
    SchemaCheck,
    with_running_usage,
    with_token_ids,
)
from gateway.api.logprobs import DEFAULT_OPTIONS, AnswerOptions
from gateway.api.misspelt import ignored_names, misspelt_fields
from gateway.api.sampling import (
    answer_form,
    conversation_of,
    form_of_parts,
    grammar_of,
    must_call,
    requested_max_tokens,
    sampling_of,
    template_variables,
    tools_for_prompt,
    tools_for_template,
)
from gateway.api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Prompt,
    parse_chat,
    parse_completion,
)
from gateway.errors import InvalidParameter, Refused
from gateway.limits.sizes import check_grammar, check_prompt_logprobs, check_prompts, check_shape, output_limit
from gateway.request.mailbox import AnyTokens, Chunks
from gateway.request.request import Conversation
from gateway.request.request import Prompt as RequestPrompt
from gateway.settings import GatewaySettings
from gateway.tokenizing.model_tokens import ModelTokens, use_of
from protocol.dialects.dialect import AnswerForm
from protocol.job import NO_TOKENIZER, Part, Sampling, pack_token_ids

_Generation = TypeVar("_Generation", bound=GenerationRequest)


class AnswerEncoder(Protocol):
    """Encodes frames as an answer."""

    @property
    def done(self) -> bytes:
        """Last event of every successful stream."""

    @property
    def request(self) -> GenerationRequest:
        """The request body."""

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Return the encoder of a streamed answer's events."""

    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Return the body of an answer that is not streamed."""

    def error_event(self, error: Refused) -> bytes:
        """Return the event sent before a started stream is aborted."""

    async def before_end(self, body: dict[str, Any] | None = None) -> None:
        """Finish the work that precedes the end of the answer: a stream's ``done``, or a whole answer's ``body``."""


class GenerationCall(JobCall[_Generation], ABC):
    """A validated body that requests text, and the format of its answer."""

    name: str  # as in RequestRecord.endpoint
    prompt_param: str  # the field that holds the prompt
    usual_max_tokens: int | None = None  # OpenAI's default for this endpoint; None: the rest of the context
    is_counted_only = False  # the prompt's token ids only count tokens; the answering API does not use them

    @property
    @abstractmethod
    def message_count(self) -> int:
        """Number of messages."""

    @abstractmethod
    async def encode_prompt(self, tokens: ModelTokens) -> list[int]:
        """Return the token ids of the prompt. Raises InvalidParameter."""

    @abstractmethod
    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling parameters, once the prompt is known. Raises InvalidParameter."""

    def conversation(self, tokens: ModelTokens, max_tokens: int, prompt_tokens: int) -> Conversation | None:
        """Build the conversation for chat pools, after the prompt is encoded. Raises InvalidParameter.

        None: completions cannot use chat pools.
        """
        del tokens, max_tokens, prompt_tokens
        return None

    @abstractmethod
    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Implement ``AnswerEncoder``."""

    @abstractmethod
    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Implement ``AnswerEncoder``."""

    @abstractmethod
    def choice(self, text: str, finish_reason: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
        """Implement ``gateway.payloads.ChoiceEncoder``."""

    async def prompt(self, tokens: ModelTokens, settings: GatewaySettings) -> RequestPrompt:
        """Implement ``Call``."""
        check_shape(settings.limits, messages=self.message_count, choices=self.request.n or 1)
        if tokens.pooling is not None:
            raise InvalidParameter(
                f"The model `{tokens.model}` does not support text generation: {use_of(tokens)}.", param="model"
            )
        prompt_ids = await self.encode_prompt(tokens)
        sampling = self.sampling(self._output_limit(tokens, settings, len(prompt_ids)))
        if sampling.grammar is not None:
            check_grammar(sampling.grammar)
        return RequestPrompt(
            b"" if self.is_counted_only else pack_token_ids(prompt_ids),
            len(prompt_ids),
            self.prompt_param,
            sampling,
            stream=bool(self.request.stream),
            conversation=self.conversation(tokens, sampling.max_tokens, len(prompt_ids)),
            limit_param=(requested_max_tokens(self.request) or ("max_tokens",))[0],
        )

    def _output_limit(self, tokens: ModelTokens, settings: GatewaySettings, prompt_tokens: int) -> int:
        return output_limit(
            settings.limits,
            settings.models[tokens.model],
            context_length=tokens.context_length,
            prompt_tokens=prompt_tokens,
            prompt_param=self.prompt_param,
            requested=requested_max_tokens(self.request),
            min_tokens=self.request.min_tokens or 0,
            choices=self.request.n or 1,
            usual_max_tokens=self.usual_max_tokens,
        )

    def check(self, prompts: Sequence[RequestPrompt], settings: GatewaySettings) -> None:
        """Implement ``Call``."""
        candidates = prompts[0].sampling.prompt_logprobs
        if candidates is not None:
            check_prompt_logprobs(
                settings.limits,
                prompt_tokens=sum(prompt.tokens for prompt in prompts),
                candidates=candidates,
                param="logprobs" if self.request.prompt_logprobs is None else "prompt_logprobs",
            )


class ChatCall(GenerationCall[ChatCompletionRequest]):
    """POST /v1/chat/completions."""

    name = "chat.completions"
    prompt_param = "messages"

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_chat(body)
        self.misspelt = misspelt_fields(self.request)
        self.adapted = ignored_names(self.misspelt)
        self.is_counted_only = False
        self._options = DEFAULT_OPTIONS
        self._form: AnswerForm | None = None  # of engine answers that are more than plain text
        self._parts_form: AnswerForm | None = None  # of all answers, if some may arrive in parts
        self._check: SchemaCheck | None = None  # of keywords that no grammar enforces

    @property
    def message_count(self) -> int:
        """Implement ``Call``."""
        return len(self.request.messages)

    async def encode_prompt(self, tokens: ModelTokens) -> list[int]:
        """Implement ``Call``."""
        request = self.request
        prompt_ids = await tokens.encode_chat(
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            tools=tools_for_template(tokens, tools_for_prompt(request)),
            variables=template_variables(tokens, request),
            within_context=self.prompt_param if request.truncate_prompt_tokens is None else None,
            notes=self.adapted,
        )
        prompt_ids = truncated(request, prompt_ids, tokens.context_length)
        self._options = AnswerOptions.of(request, prompt_ids)
        self.is_counted_only = tokens.counts_chats
        self._form = None if tokens.counts_chats else answer_form(tokens, request, prompt_ids)
        self._parts_form = form_of_parts(request) if tokens.takes_messages and self._form is None else self._form
        self._check = SchemaCheck() if tokens.lenient_schemas and not tokens.counts_chats else None
        self._defaults = tokens.sampling
        return prompt_ids

    def conversation(self, tokens: ModelTokens, max_tokens: int, prompt_tokens: int) -> Conversation | None:
        """Implement ``Call``."""
        return conversation_of(
            self.request, tokens, max_tokens=max_tokens, prompt_tokens=prompt_tokens, is_text=self._form is None
        )

    def sampling(self, max_tokens: int) -> Sampling:
        """Implement ``Call``."""
        if self.is_counted_only:  # the hosted API validates the schema
            return self._unstopped(sampling_of(self.request, max_tokens, defaults=self._defaults, is_enforced=False))
        sampling = self._unstopped(sampling_of(self.request, max_tokens, self._check, self._defaults))
        form = self._form
        if form is None:
            return sampling
        skip_special_tokens = sampling.skip_special_tokens and not form.dialect.has_special_marks
        grammar = grammar_of(form, self.request, sampling.grammar, self._check)
        return replace(
            sampling,
            grammar=grammar,
            skip_special_tokens=skip_special_tokens,
            markup=form.markup if sampling.stop else None,
        )

    def _unstopped(self, sampling: Sampling) -> Sampling:
        """Remove stop strings if the answer must be a call: text before the call must not end the answer."""
        return replace(sampling, stop=()) if must_call(self.request) else sampling

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Implement ``Call``."""
        request = self.request
        choices = request.n or 1
        answer_id = f"chatcmpl-{answer_id}"
        shape: dict[str, Any] = {
            "choices": choices,
            "with_usage": request.include_usage,
            "options": self._options,
        }
        chunks: Chunks = (
            ChatChunks(answer_id, created, request.model, **shape)
            if self._parts_form is None
            else ParsedChatChunks(answer_id, created, request.model, form=self._parts_form, **shape)
        )
        chunks = with_running_usage(chunks, request, self._options)
        if self._check:
            chunks = CheckedChunks(chunks, self._check, choices=choices)
        return with_token_ids(chunks, self._options, choices=choices, prompt_in_choice=False)

    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Implement ``Call``."""
        return chat_answer(
            f"chatcmpl-{answer_id}",
            created,
            self.request.model,
            await gather(frames, self.request.n or 1),
            usage=usage,
            options=self._options,
            form=self._parts_form,
            check=self._check,
        )

    def choice(self, text: str, finish_reason: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
        """Implement ``Call``."""
        form = self._parts_form
        return choice_object(ChoiceContent(text, finish_reason, parts), form.parser() if form else None)


class CompletionCall(GenerationCall[CompletionRequest]):
    """POST /v1/completions."""

    name = "completions"
    usual_max_tokens = 16
    message_count = 0

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_completion(body)
        self.misspelt = misspelt_fields(self.request)
        self.adapted = ignored_names(self.misspelt)
        self.prompt_param = "prompt"
        self.first_index = 0  # see AnswerOptions
        self._options = DEFAULT_OPTIONS
        self._check: SchemaCheck | None = None  # of keywords that no grammar enforces

    def parts(self, settings: GatewaySettings) -> Sequence[Self]:
        """Implement ``Call``: a call for each prompt, in their order."""
        whole, prompts = super().parts(settings), self.request.prompts
        if len(prompts) == 1:
            return whole
        check_prompts(settings.limits, len(prompts))
        return [self._part(*one) for one in enumerate(prompts)]

    def _part(self, number: int, prompt: Prompt) -> Self:
        part = copy(self)
        part.request = self.request.model_copy(update={"prompt": prompt})
        part.prompt_param = f"prompt[{number}]"
        part.first_index = number * (self.request.n or 1)
        return part

    async def encode_prompt(self, tokens: ModelTokens) -> list[int]:
        """Implement ``Call``."""
        if tokens.tokenizer == NO_TOKENIZER:
            text = f"The model {tokens.model} is served only by chat APIs. Use /v1/chat/completions."
            raise InvalidParameter(text, param="model")
        request, echo = self.request, ""
        [prompt] = request.prompts
        if isinstance(prompt, str):
            given_ids = await tokens.encode_text(
                prompt,
                add_special_tokens=request.add_special_tokens,
                within_context=self.prompt_param if request.truncate_prompt_tokens is None else None,
            )
        else:
            given_ids = prompt
        prompt_ids = truncated(request, given_ids, tokens.context_length)
        if request.echo:
            is_whole = len(prompt_ids) == len(given_ids)
            echo = prompt if isinstance(prompt, str) and is_whole else await tokens.decode(prompt_ids)
        self._options = AnswerOptions.of(request, prompt_ids, echo, first_index=self.first_index)
        self._check = SchemaCheck() if tokens.lenient_schemas else None
        self._defaults = tokens.sampling
        return prompt_ids

    def sampling(self, max_tokens: int) -> Sampling:
        """Implement ``Call``."""
        return sampling_of(self.request, max_tokens, self._check, self._defaults)

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Implement ``Call``."""
        request = self.request
        choices = request.n or 1
        chunks: Chunks = CompletionChunks(
            f"cmpl-{answer_id}",
            created,
            request.model,
            choices=choices,
            with_usage=request.include_usage,
            options=self._options,
        )
        chunks = with_running_usage(chunks, request, self._options)
        if self._check:
            chunks = CheckedChunks(chunks, self._check, choices=choices, echo_chars=len(self._options.echo))
        return with_token_ids(chunks, self._options, choices=choices, prompt_in_choice=True)

    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Implement ``Call``."""
        return self.answer_body(answer_id, created, [await self.rows(frames)], usage)

    async def rows(self, frames: Iterable[AnyTokens]) -> CompletionRows:
        """Return the choices of an answer that is not streamed."""
        return completion_rows(await gather(frames, self.request.n or 1), self._options, self._check)

    def answer_body(
        self, answer_id: str, created: int, prompts: Sequence[CompletionRows], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Return the body of an answer with the choices of these prompts."""
        return completion_answer(
            f"cmpl-{answer_id}", created, self.request.model, prompts, usage=usage, options=self._options
        )

    def choice(self, text: str, finish_reason: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
        """Implement ``Call``."""
        del parts
        return {"text": text, "finish_reason": finish_reason}


def truncated(request: GenerationRequest, prompt_ids: list[int], context_length: int) -> list[int]:
    """Return the prompt's tokens, truncated if the request allows it."""
    most = request.truncate_prompt_tokens
    if most == -1:
        _, max_tokens = requested_max_tokens(request) or ("", 1)
        most = max(1, context_length - max(1, max_tokens))
    if most is None:
        return prompt_ids
    return prompt_ids[:most] if request.truncation_side == "right" else prompt_ids[max(0, len(prompt_ids) - most) :]
