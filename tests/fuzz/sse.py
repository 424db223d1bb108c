"""Streams of upstream servers: every framing, and of each event every format that a pool may be set to.

What a format reads goes into frames, so it must be possible to write it into one that the gateway reads.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from engine.text.detokenizer import TokenText
from engine.types import GenerationRequest
from pool_worker.engines.chat_formats import chat_format
from pool_worker.engines.chat_formats.base import AnswerReader, ChatServerRequest
from pool_worker.engines.event_decoder import EventDecoder
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.base import WireFormat
from pool_worker.engines.framing import DONE, FRAMINGS, Framing, MalformedEvent, ServerFailure
from pool_worker.engines.reported_errors import failure_in
from pool_worker.engines.server_choice import ServerChoice
from pool_worker.engines.tokenizer_folder import TokenizerFolder
from pool_worker.settings import (
    AnthropicSettings,
    AnyChatSettings,
    BedrockSettings,
    OpenAIChatSettings,
    SageMakerSettings,
    VertexSettings,
)
from protocol import job as m
from protocol.generation import SamplingParams
from protocol.job import Chat, Deltas, StepFrame, Turn, decode_step
from protocol.wire import UNDECODABLE
from spillway.config import DEMO_MODEL_PATH
from tests.fuzz.driving import cut_bytes, driven, pieces
from tests.fuzz.mutations import Form

FORM: Form = "events"
MAX_TOKENS = 16
# What ``ServerConnection.stream`` takes for the server's fault.
FAULTS = (MalformedEvent, ServerFailure, *UNDECODABLE)

_TOKENIZER = TokenizerFolder(DEMO_MODEL_PATH)
_TOKENS = TokenText(_TOKENIZER)
_REQUEST = GenerationRequest("r", (1, 2), SamplingParams(max_tokens=MAX_TOKENS, logprobs=2))
_URL = "http://localhost"
_CHATS: list[AnyChatSettings] = [
    OpenAIChatSettings(kind="openai_chat", url=_URL, model="m", profile="openai"),
    OpenAIChatSettings(kind="openai_chat", url=_URL, model="m", profile="tgi"),
    AnthropicSettings(kind="anthropic", model="m"),
    BedrockSettings.model_validate({"kind": "bedrock", "model": "m", "aws_region": "eu-west-1"}),
    SageMakerSettings.model_validate({"kind": "sagemaker", "model": "m", "aws_region": "eu-west-1", "endpoint": "e"}),
    VertexSettings.model_validate({"kind": "vertex", "model": "m", "project": "p", "location": "global"}),
]
_FORMATS = [chat_format(settings) for settings in _CHATS]
_ASK = ChatServerRequest("m", Chat((Turn("user", "hello"),)), _REQUEST.sampling, MAX_TOKENS, None, prefix="He")


def _stream(*events: str) -> bytes:
    return b"".join(b"data: " + event.encode() + b"\n\n" for event in events)


SEEDS = [
    _stream(
        '{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"Hello","reasoning":"why"}}]}',
        '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"{}"}}]}}]}',
        '{"choices":[{"index":0,"delta":{"content":[{"type":"text","text":"a"},{"type":"thinking","thinking":[{"text":"b"}]}]},'
        '"finish_reason":"stop"}]}',
        '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1},'
        '"completion_tokens_details":{"reasoning_tokens":1}},"x_groq":{"usage":{}}}',
        "[DONE]",
    ),
    _stream(
        '{"type":"message_start","message":{"usage":{"input_tokens":3,"output_tokens":1,"cache_read_input_tokens":1}}}',
        '{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}',
        '{"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"a","name":"f"}}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{}"}}',
        '{"type":"content_block_stop","index":1}',
        '{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}',
    ),
    _stream(
        '{"choices":[{"index":0,"text":"Hi","token_ids":[72,105],"finish_reason":null,"logprobs":{"tokens":["token_id:72",'
        '"token_id:105"],"token_logprobs":[-0.5,-0.25],"top_logprobs":[{"token_id:72":-0.5},{"token_id:105":-0.25}]}}]}',
        '{"choices":[{"index":0,"text":"","token_ids":[],"finish_reason":"stop"}]}',
        '{"choices":[],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}',
    ),
    _stream(
        '{"content":"H","tokens":[72],"stop":false,"completion_probabilities":[{"id":72,"logprob":-0.5,"top_logprobs":'
        '[{"id":72,"logprob":-0.5}]}]}',
        '{"content":"","stop":true,"stop_type":"eos","timings":{"cache_n":2}}',
    ),
    _stream(
        '{"output_ids":[72],"meta_info":{"finish_reason":null,"completion_tokens":1,"cached_tokens":1}}',
        '{"output_ids":[72,105],"meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":2}}',
    ),
    _stream(
        '{"token":{"id":72,"text":"H","logprob":-0.5},"top_tokens":[{"id":72,"logprob":-0.5}],"details":null}',
        '{"token":{"id":105,"text":"i","logprob":-0.5},"details":{"finish_reason":"eos_token"}}',
    ),
    b'{"response":"Hi","done":false}\n{"response":"","done":true,"done_reason":"stop"}\n',
    _stream('{"text_output":"Hi","finish_reason":""}', '{"text_output":"","finish_reason":"stop"}'),
    _stream(
        '{"messageStart":{"role":"assistant"}}',
        '{"contentBlockStart":{"contentBlockIndex":0,"start":{"toolUse":{"name":"f","toolUseId":"a"}}}}',
        '{"contentBlockDelta":{"contentBlockIndex":0,"delta":{"text":"Hello","toolUse":{"input":"{}"}}}}',
        '{"contentBlockStop":{"contentBlockIndex":0}}',
        '{"messageStop":{"stopReason":"end_turn"}}',
        '{"metadata":{"usage":{"inputTokens":3,"outputTokens":2,"cacheReadInputTokens":1}}}',
    ),
    _stream(
        '{"candidates":[{"index":0,"content":{"parts":[{"text":"Hello"},{"text":"why","thought":true},'
        '{"functionCall":{"name":"f","args":{"a":1},"id":"c"}}]},"finishReason":"STOP"}],"usageMetadata":'
        '{"promptTokenCount":3,"candidatesTokenCount":2,"thoughtsTokenCount":1,"cachedContentTokenCount":1}}',
    ),
    _stream(
        '{"data":[{"id":"m","max_model_len":512}],"default_generation_settings":{"n_ctx":512},"total_slots":2,'
        '"model_id":"m","max_input_tokens":1,"max_total_tokens":2,"max_concurrent_requests":3,"model_path":"m"}'
    ),
    _stream('{"error":{"message":"no"}}', '{"type":"error","error":{"type":"overloaded_error"}}'),
]


def run(payload: bytes) -> None:
    for framing in FRAMINGS:
        events = driven(_events(payload, framing))
        for wire_format in FORMATS.values():
            if wire_format.framing == framing:
                _read_tokens(events, wire_format)
        for one in _FORMATS:
            # Amazon's are in a binary framing that mutations rarely leave whole: their events come as text, too.
            if one.framing == framing or framing == "server-sent events":
                _read_parts(events, one.reader(_ASK))


async def _events(payload: bytes, framing: Framing) -> list[Mapping[str, Any]]:
    """Return the events up to the first fault."""
    events: list[Mapping[str, Any]] = []
    decoder = EventDecoder()
    with contextlib.suppress(*FAULTS):
        async for data in FRAMINGS[framing](pieces(payload, cut_bytes(payload))):
            if data != DONE:
                event = decoder.read(data)
                failure_in(event)
                events.append(event)  # those before the fault stay
    return events


def _read_tokens(events: list[Mapping[str, Any]], wire_format: type[WireFormat]) -> None:
    for event in events:
        with contextlib.suppress(MalformedEvent):  # its page about itself comes from the same server
            wire_format.facts(event, None)
    choice, seen_tokens = ServerChoice(_REQUEST, 0, _TOKENS, _TOKENIZER.eos_ids), 0
    for event in events:
        try:
            delta = wire_format.read(event, seen_tokens)
            seen_tokens += len(delta.token_ids)
            output = choice.take(delta)
        except (MalformedEvent, ServerFailure):
            return
        if output is not None:
            logprobs = tuple(output.logprobs or ())
            reason = output.finish_reason
            _send(m.Tokens("r", 1, 1, 0, tuple(output.token_ids), output.text, reason, logprobs))
            _send(m.Finished("r", 1, 2, False, 2, output.cached_tokens, len(output.token_ids), 1.0))
        if choice.text.finish_reason is not None:
            return


def _read_parts(events: list[Mapping[str, Any]], reader: AnswerReader) -> None:
    for event in events:
        try:
            delta = reader.read(event)
        except (MalformedEvent, ServerFailure):
            return
        _send(Deltas("r", 1, 1, 0, tuple(delta.parts), 1, delta.ended_by, delta.usage))


def _send(frame: m.Frame) -> None:
    step = m.encode(StepFrame(m.PROTOCOL_VERSION, "w", (frame,)))
    assert not isinstance(decode_step(step).frames[0], m.UnreadableFrame), frame
