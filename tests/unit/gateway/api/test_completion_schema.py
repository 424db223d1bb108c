from typing import Any

import pytest

from gateway.api.schema import parse_chat, parse_completion, parse_tokenize
from gateway.errors import BadRequest, InvalidParameter, MalformedJson
from tests.unit.gateway.api.bodies import chat, completion


@pytest.mark.parametrize(
    ("prompt", "parsed"), [("p", "p"), (["p"], "p"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ("", "")]
)
def test_prompts(prompt: object, parsed: object) -> None:
    request = parse_completion(completion(prompt=prompt))
    assert (request.prompt, request.prompts) == (parsed, [parsed])


@pytest.mark.parametrize("prompts", [["a", ""], [[1, 2], [3]], ["a", [3]]])
def test_several_prompts(prompts: list[object]) -> None:
    assert parse_completion(completion(prompt=prompts)).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a", None]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1]"),
        ({"prompt": [[], [2]]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2, "echo": True}, "max_tokens"),
        (
            {
                "prompt": ["a", "b"],
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            "stream_options.continuous_usage_stats",
        ),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_completion_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_completion(completion(**fields))
    assert caught.value.param == param


def test_missing_fields_are_reported_as_missing() -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_chat(b'{"messages": []}')
    assert (caught.value.param, caught.value.code) == ("model", "missing_required_parameter")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model": "m", "messages": [}'])
def test_malformed_json(body: bytes) -> None:
    with pytest.raises(MalformedJson) as caught:
        parse_chat(body)
    assert caught.value.param is None


@pytest.mark.parametrize("body", [b"[]", b"5", b"null"])
def test_json_that_is_not_an_object(body: bytes) -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        parse_chat(body)


def test_tokenize_takes_one_of_two() -> None:
    assert parse_tokenize(b'{"prompt": "x"}').prompt == "x"
    for body in (b"{}", b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}'):
        with pytest.raises(InvalidParameter):
            parse_tokenize(body)


def test_parts_that_are_text() -> None:
    parts = [{"type": "text", "text": "No"}, {"type": "refusal", "refusal": "I cannot"}]
    messages = [{"role": "user", "content": []}, {"role": "assistant", "content": parts}]
    given = [message.for_template() for message in parse_chat(chat(messages=messages)).messages]
    assert [message["content"] for message in given] == ["", "No\nI cannot"]
