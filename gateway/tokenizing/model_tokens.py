"""One served model's tokens: its chat template, tokenizer and context length."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from gateway.errors import ContextLengthExceeded, InvalidParameter
from gateway.tokenizing.control_tokens import ControlTokens
from gateway.tokenizing.encoder_pool import EncoderPool
from gateway.tokenizing.encoders import EncodedPair, Encoder
from gateway.tokenizing.renderer import Renderer
from gateway.tokenizing.templates import BeyondLimits, ChatTemplate, up_to_content
from gateway.tokenizing.turns import STRICT, STRICTEST, TOOLS_DESCRIBED, fitted
from protocol.dialects.dialect import Dialect
from protocol.dialects.generic import with_tool_prompt
from protocol.generation import PoolingCard

INLINE_CHARS: Final = 4096  # about 1 ms of encoding; longer prompts go to a thread
END_TOKENS: Final = 16  # of a prompt: enough for a mark that begins reasoning, even in several tokens

Messages = Sequence[Mapping[str, Any]]  # of a conversation, or its tools, as chat templates expect them
Conversation = tuple[Messages, Messages, Mapping[str, Any] | None]  # with its tools, and the template's variables
AnyTemplate = ChatTemplate | Renderer
_Result = TypeVar("_Result")


class ModelTokens:
    """Renders and encodes prompts for one model without blocking the event loop."""

    def __init__(
        self,
        model: str,
        encoder: Encoder,
        template: AnyTemplate | None,
        context_length: int,
        pool: EncoderPool,
        *,
        add_special_tokens: bool = True,
        pooling: PoolingCard | None = None,
        tool_template: AnyTemplate | None = None,
        dialect: Dialect | None = None,
        control_tokens_in_content: bool = False,
        lenient_schemas: bool = False,
        tokenizer: str = "",
        takes_messages: bool = False,
        counts_chats: bool = False,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.model = model
        # protocol.job.Revision.tokenizer of the workers that understand its ids; NO_TOKENIZER: no such workers.
        self.tokenizer = tokenizer
        self.takes_messages = takes_messages  # some of its pools take messages
        self.counts_chats = counts_chats  # only those answer chats: ids merely count tokens
        self.pooling = pooling  # None: a model that generates text
        self.context_length = context_length  # prompt + output tokens
        self.dialect = dialect  # of answers to a conversation; None: plain text
        self.sampling = sampling or {}  # its own defaults: protocol.generation
        self.lenient_schemas = lenient_schemas  # keywords that no grammar can enforce are ignored
        self._encoder = encoder
        self._template = template
        self._tool_template = tool_template or template  # for conversations with tools
        self._pool = pool
        self._tenant = ""  # the tenant whose share of the threads is used
        self._add_special_tokens = add_special_tokens
        self._control_tokens = None if control_tokens_in_content else ControlTokens(encoder)

    def of_tenant(self, tenant: str) -> "ModelTokens":
        """Return a copy that charges long work to a tenant's share of the threads."""
        tokens = object.__new__(ModelTokens)
        tokens.__dict__.update(self.__dict__, _tenant=tenant)  # done per request: copy.copy takes ten times as long
        return tokens

    async def close(self) -> None:
        """Stop the processes that render its templates."""
        for template in (self._template, self._tool_template):
            if isinstance(template, Renderer):
                await template.close()

    async def encode_text(
        self, text: str, *, add_special_tokens: bool | None = None, within_context: str | None = None
    ) -> list[int]:
        """Return the token ids of a plain prompt, by default with the model's own special tokens.

        ``within_context``: the prompt's field in the request; raises ContextLengthExceeded if the prompt is too long.
        """
        special = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        self._refuse_too_long(text, within_context)
        return await self._run(
            len(text),
            lambda: self._check_length(self._encoder.encode(text, add_special_tokens=special), within_context),
        )

    async def encode_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Messages = (),
        variables: Mapping[str, Any] | None = None,
        within_context: str | None = None,
        notes: set[str] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the end of the last message's text if that is continued.

        The text of a control token in a message stays text, unless the model's settings say otherwise.
        ``within_context``: see ``encode_text``. ``notes``: gets the names of the changes that the template needed
        (``gateway.tokenizing.turns``). Raises InvalidParameter if the template refuses the conversation or the model
        has none.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidParameter(f"The model {self.model} has no chat template. Use /v1/completions.", param="model")
        described: set[str] = set()
        if tools and self._describes_tools_itself:
            messages, tools, described = with_tool_prompt(messages, tools), (), {TOOLS_DESCRIBED}
        refusal: InvalidParameter | None = None
        for conversation, changes in _fitted_to(template, messages, calls_as_text=self._describes_tools_itself):
            try:
                token_ids = await self._encode_chat(
                    template,
                    (conversation, tools, variables),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    within_context=within_context,
                )
            except BeyondLimits:
                raise
            except InvalidParameter as error:
                if error.param != "messages":
                    raise
                refusal = refusal or error
            else:
                if notes is not None:
                    notes |= changes | described
                return token_ids
        raise refusal or InvalidParameter(param="messages")

    async def _encode_chat(
        self,
        template: AnyTemplate,
        conversation: Conversation,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        within_context: str | None,
    ) -> list[int]:
        messages, tools, variables = conversation
        values = [value for message in messages for value in message.values()]
        texts = [value if isinstance(value, str) else str(value) for value in values]
        if tools or variables:
            texts += [str(tools), str(variables)]

        def marked() -> tuple[bool, Conversation]:
            control, given = self._control_tokens, (messages, tools, variables)
            if control is not None and control.occur_in(texts):
                return True, control.marked(given)
            return False, given

        def encoded(text: str, conversation: Conversation, *, is_marked: bool) -> list[int]:
            if continue_final_message:
                text = up_to_content(text, conversation[0][-1].get("content") or "")
            control = self._control_tokens
            if control is not None and is_marked:
                self._refuse_too_long(control.unmarked(text), within_context)
                return self._check_length(control.encode(text), within_context)
            self._refuse_too_long(text, within_context)
            # The template has already written all special tokens.
            return self._check_length(self._encoder.encode(text, add_special_tokens=False), within_context)

        def rendered_and_encoded(template: ChatTemplate) -> list[int]:
            is_marked, given = marked()
            text = template.render(
                given[0], add_generation_prompt=add_generation_prompt, tools=given[1], variables=given[2]
            )
            return encoded(text, given, is_marked=is_marked)

        size = sum(map(len, texts))
        if isinstance(template, ChatTemplate):
            here = template
            return await self._run(size, lambda: rendered_and_encoded(here))
        is_marked, given = await self._run(size, marked)
        text = await template.render(
            given[0], add_generation_prompt=add_generation_prompt, tools=given[1], variables=given[2]
        )
        return await self._run(len(text), lambda: encoded(text, given, is_marked=is_marked))

    @property
    def describes_tools(self) -> bool:
        """True if prompts describe tools: in the chat template or in a system message of the gateway."""
        return self._describes_tools_itself or self.template_reads("tools")

    @property
    def _describes_tools_itself(self) -> bool:
        return self.dialect is not None and self.dialect.is_generic

    def template_reads(self, variable: str) -> bool:
        """Report whether the chat template, or the one for conversations with tools, uses a variable."""
        return any(template and variable in template.variables for template in (self._template, self._tool_template))

    async def token_texts(self, token_ids: list[int]) -> list[str | None]:
        """Return each token's entry in the vocabulary; None for ids that do not exist."""
        return await self._run(len(token_ids), lambda: [self._encoder.token_text(token_id) for token_id in token_ids])

    def end_of(self, prompt_ids: list[int]) -> str:
        """Return the text of the last END_TOKENS tokens of an encoded prompt."""
        return self._encoder.decode(prompt_ids[-END_TOKENS:])

    async def encode_inputs(
        self, texts: list[str], *, add_special_tokens: bool | None, most_tokens: int | None, field: str
    ) -> list[list[int]]:
        """Return the token ids of several texts, each cut to ``most_tokens`` (None: not cut).

        ``field``: their field in the request; raises ContextLengthExceeded for a text that is too long and not cut.
        """
        if most_tokens is None:
            for number, text in enumerate(texts):
                self._refuse_too_long(text, f"{field}.{number}")
        special = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        return await self._run(
            sum(map(len, texts)),
            lambda: self._encoder.encode_inputs(texts, add_special_tokens=special, most_tokens=most_tokens),
        )

    async def encode_pairs(self, pairs: list[tuple[str, str]], *, most_tokens: int | None) -> list[EncodedPair]:
        """Return the token ids of pairs of texts. Raises TokenizerError if the tokenizer does not support pairs."""
        size = sum(len(first) + len(second) for first, second in pairs)
        return await self._run(size, lambda: self._encoder.encode_pairs(pairs, most_tokens=most_tokens))

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""
        return await self._run(len(token_ids), lambda: self._encoder.decode(token_ids))

    async def _run(self, size: int, work: Callable[[], _Result]) -> _Result:
        if size <= INLINE_CHARS and not self._encoder.may_backtrack:
            return work()
        return await self._pool.run(self._tenant, size, work)

    def _refuse_too_long(self, text: str, field: str | None) -> None:
        """Raise ContextLengthExceeded for a text that is too long in any encoding; encoding it would take seconds."""
        max_chars = self._encoder.max_chars
        if field is None or max_chars is None or len(text) <= self.context_length * max_chars:
            return
        at_least = math.ceil(len(text) / max_chars)
        raise ContextLengthExceeded(
            f"This model's maximum context length is {self.context_length} tokens. However, the {len(text)} characters"
            f" of your {field} are at least {at_least} tokens. Please reduce the length of the {field}.",
            param=field,
        )

    def _check_length(self, token_ids: list[int], field: str | None) -> list[int]:
        """Raise ContextLengthExceeded for too many tokens, and free them: the exception may live for long."""
        count = len(token_ids)
        if field is None or count < self.context_length:
            return token_ids
        token_ids.clear()
        raise prompt_too_long(self.context_length, count, field)


def _fitted_to(
    template: AnyTemplate, messages: Messages, *, calls_as_text: bool
) -> Iterator[tuple[Messages, set[str]]]:
    """Yield a conversation as a template takes it; then, if it is refused nevertheless, in stricter forms."""
    tried: list[Messages] = []
    for rules in (template.rules, STRICT, STRICTEST):
        notes: set[str] = set()
        conversation = fitted(messages, replace(rules, tool_results=False) if calls_as_text else rules, notes)
        if conversation not in tried:
            tried.append(conversation)
            yield conversation, notes


def use_of(tokens: ModelTokens) -> str:
    """Describe what a model is for, for the refusal of other requests."""
    if tokens.pooling is None:
        return "it generates text; use /v1/chat/completions or /v1/completions"
    if tokens.pooling.task == "embed":
        return "it is an embedding model; use /v1/embeddings"
    return "it scores pairs of texts; use /v1/score or /v1/rerank"


def prompt_too_long(context_length: int, prompt_tokens: int, prompt_param: str) -> ContextLengthExceeded:
    """Return the refusal of a prompt that leaves no token for an answer."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context_length} tokens. However, your {prompt_param} resulted in"
        f" {prompt_tokens} tokens. Please reduce the length of the {prompt_param}.",
        param=prompt_param,
    )
