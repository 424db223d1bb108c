"""Errors name a field once, with the field name of the client's API."""

import json

import pytest

from gateway.api.anthropic_messages import Messages
from gateway.api.openai_responses import Responses
from gateway.api.surface import AnswerHead
from gateway.errors import InvalidParameter

HEAD = AnswerHead("1", 0, "m", 1)
MESSAGES = Messages().translate(b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}')
RESPONSES = Responses().translate(b'{"model": "m", "input": "Hi"}')
DEEP = "tools.1.function.parameters.properties.function.pattern"
SCHEMA = "response_format.json_schema.schema.properties.stop.pattern"


@pytest.mark.parametrize(
    ("param", "message", "of_messages", "of_responses"),
    [
        # The chat's field, the message, and the fields in Messages and Responses.
        ("stop", "'{}' must hold at most 16 strings", "stop_sequences", "stop"),
        ("stop.0", "'{}' must be a string", "stop_sequences.0", "stop.0"),
        ("stop_token_ids", "'{}' is wrong", "stop_token_ids", "stop_token_ids"),
        ("user", "'{}' is too long", "metadata.user_id", "user"),
        ("user_id", "'{}' is too long", "user_id", "user_id"),
        ("max_tokens", "'{}' is too high: lower '{}'", "max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "'{}' is too high", "max_completion_tokens", "max_output_tokens"),
        ("messages", "'{}' must not be empty", "messages", "input"),
        ("messages.2.content", "'{}' must be a string", "messages.2.content", "input.2.content"),
        ("reasoning_effort", "takes as '{}' low, high", "output_config.effort", "reasoning.effort"),
        ("response_format", "'{}' is not supported", "output_config.format", "text.format"),
        (
            SCHEMA,
            "the schema ({}) has a lookahead",
            "output_config.format.schema.properties.stop.pattern",
            "text.format.schema.properties.stop.pattern",
        ),
        (
            DEEP,
            "a pattern ({}) has a lookahead",
            "tools.1.input_schema.properties.function.pattern",
            "tools.1.parameters.properties.function.pattern",
        ),
        ("tools.0.function.name", "'{}' is the name of more than one tool", "tools.0.name", "tools.0.name"),
        ("tools", "'{}' is not supported here", "tools", "tools"),
        ("tool_choice.function.name", "'{}' names no tool", "tool_choice.name", "tool_choice.name"),
        ("chat_template_kwargs", "does not support '{}'", "thinking", "chat_template_kwargs"),
        (
            "chat_template_kwargs.enable_thinking",
            "does not support '{}'",
            "thinking",
            "chat_template_kwargs.enable_thinking",
        ),
        (
            "parallel_tool_calls",
            "'{}' is not supported",
            "tool_choice.disable_parallel_tool_use",
            "parallel_tool_calls",
        ),
    ],
)
def test_each_field(param: str, message: str, of_messages: str, of_responses: str) -> None:
    error = InvalidParameter(message.replace("{}", param), param=param)
    told = json.loads(Messages().error_body(error, "req_1"))["error"]["message"]
    assert told == message.replace("{}", of_messages)
    body = json.loads(Responses().error_body(error, "req_1"))["error"]
    assert (body["message"], body["param"]) == (message.replace("{}", of_responses), of_responses)
    assert json.dumps(told) in MESSAGES.events(HEAD).failed(error).decode()  # after the stream has started
    assert json.dumps(body["message"]) in RESPONSES.events(HEAD).failed(error).decode()
    assert Messages().field_name(param) == of_messages
    assert Responses().field_name(param) == of_responses


def test_a_message_without_the_field_gets_it() -> None:
    """Messages has no separate field for it."""
    error = InvalidParameter("more than the pool holds", param="stop")
    told = json.loads(Messages().error_body(error, "req_1"))["error"]["message"]
    assert told == "stop_sequences: more than the pool holds"
    assert json.loads(Messages().error_body(InvalidParameter("no"), "req_1"))["error"]["message"] == "no"


def test_words_and_texts_of_the_client_are_not_renamed() -> None:
    error = InvalidParameter("'stop' stops at the user's 'user'", param="stop")
    told = json.loads(Messages().error_body(error, "req_1"))["error"]["message"]
    assert told == "'stop_sequences' stops at the user's 'user'"
