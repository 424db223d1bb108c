import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.errors import ContextLengthExceeded, InvalidParameter
from gateway.tokenizing import model_tokens
from gateway.tokenizing.encoder_pool import EncoderPool
from gateway.tokenizing.encoders import HuggingFaceEncoder
from gateway.tokenizing.model_tokens import ModelTokens
from gateway.tokenizing.templates import ChatTemplate
from tests.small_tokenizer import CHATML, START, byte_tokenizer, byte_tokenizer_json


def tokens(template: str | None = CHATML) -> ModelTokens:
    chat = ChatTemplate(template, {}) if template else None
    return ModelTokens("m", HuggingFaceEncoder(byte_tokenizer_json()), chat, 100, EncoderPool())


@pytest.mark.parametrize("size", [10, model_tokens.INLINE_CHARS + 1])
async def test_short_and_long_prompts_are_encoded_equally(size: int) -> None:
    text = "héllo " * size
    assert await tokens().encode_text(text) == byte_tokenizer().encode(text).ids
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert await tokens().encode_chat([{"role": "user", "content": text}]) == (
        byte_tokenizer().encode(rendered, add_special_tokens=False).ids
    )


@pytest.mark.parametrize(
    "more", [{"reasoning_content": "x"}, {"name": "x"}, {"tool_calls": "x"}, {"variables": {"x": "x"}}]
)
async def test_all_rendered_text_counts_as_long(more: dict[str, Any]) -> None:
    """4 MB of reasoning, rendered in the event loop, once blocked all requests."""

    class Counting(EncoderPool):
        runs = 0

        async def run(self, tenant: str, size_bytes: int, work: Callable[[], Any], **how: Any) -> Any:
            self.runs += 1
            return await super().run(tenant, size_bytes, work, **how)

    pool = Counting()
    ours = ModelTokens("m", HuggingFaceEncoder(byte_tokenizer_json()), ChatTemplate(CHATML, {}), 100, pool)
    for times in (1, model_tokens.INLINE_CHARS):
        long = json.loads(json.dumps(more).replace('"x"}', f'"{"x" * times}"}}'))
        variables = long.pop("variables", None)
        await ours.encode_chat([{"role": "assistant", "content": "a", **long}], variables=variables)
        assert pool.runs == (times > 1)
    pool.close()


async def test_a_model_without_a_chat_template() -> None:
    with pytest.raises(InvalidParameter, match="no chat template") as caught:
        await tokens(None).encode_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "model"


class NeverEncoding(HuggingFaceEncoder):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise AssertionError(f"{len(text)} characters were encoded ({add_special_tokens=})")


async def test_an_oversized_text_is_refused_without_encoding() -> None:
    """Encoding 4 MB of text once took 4 s and permanently half a gigabyte of memory."""
    chat = ChatTemplate(CHATML, {})
    ours = ModelTokens("m", NeverEncoding(byte_tokenizer_json()), chat, 100, EncoderPool()).of_tenant("t")
    text = "a" * (100 * len(START) + 1)  # the longest token
    for asked in (
        ours.encode_text(text, within_context="prompt[3]"),
        ours.encode_chat([{"role": "user", "content": text}], within_context="messages"),
    ):
        with pytest.raises(ContextLengthExceeded, match="are at least 10[1-9] tokens"):
            await asked
    with pytest.raises(ContextLengthExceeded) as caught:
        await ours.encode_inputs(["a", text], add_special_tokens=None, most_tokens=None, field="input")
    assert caught.value.param == "input.1"
    with pytest.raises(AssertionError):  # only the count and the last tokens are available
        await ours.encode_text(text)


async def test_a_refusal_does_not_hold_the_tokens() -> None:
    encoded: list[list[int]] = []

    class Remembering(HuggingFaceEncoder):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            encoded.append(super().encode(text, add_special_tokens=add_special_tokens))
            return encoded[-1]

    ours = ModelTokens("m", Remembering(byte_tokenizer_json()), None, 100, EncoderPool())
    with pytest.raises(ContextLengthExceeded, match="your prompt resulted in 102 tokens"):
        await ours.encode_text("a" * 101, within_context="prompt")
    assert encoded == [[]]
    assert len(await ours.encode_text("a" * 98, within_context="prompt")) == 99


async def test_a_long_prompt_does_not_block_the_event_loop() -> None:
    """Counts iterations of the loop: an encoder that holds the GIL would allow hardly any."""
    subject = tokens()
    text = "The quick brown fox jumps over the lazy dog. " * 12_000  # 540 kB: about 0.1 s of encoding
    encoding = asyncio.create_task(subject.encode_text(text))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) > len(text) // 2
    assert turns >= 10


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " Once upon\n"])
async def test_a_final_message_is_continued_like_in_transformers(content: str) -> None:
    messages = [{"role": "user", "content": "a story"}, {"role": "assistant", "content": content}]
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    for template in (CHATML, CHATML.replace("message.content", "message.content | trim")):
        continued = await tokens(template).encode_chat(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        expected = oracle.apply_chat_template(
            messages, chat_template=template, continue_final_message=True, tokenize=False
        )
        assert continued == byte_tokenizer().encode(str(expected), add_special_tokens=False).ids


async def test_nothing_to_continue() -> None:
    with pytest.raises(InvalidParameter) as caught:
        await tokens().encode_chat([{"role": "user", "content": " "}], continue_final_message=True)
    assert caught.value.param == "continue_final_message"
