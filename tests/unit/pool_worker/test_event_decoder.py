"""Characters that a server split in halves are joined; a half without its counterpart becomes U+FFFD."""

import msgspec
import pytest

from pool_worker.engines.event_decoder import EventDecoder


def event(content: str) -> bytes:
    """Return an event with the given content, including its escapes."""
    return b'{"choices": [{"delta": {"content": "%s"}}]}' % content.encode()


def text_of(*events: bytes) -> str:
    decoder = EventDecoder()
    deltas = [decoder.read(data)["choices"][0]["delta"] for data in events]
    return "".join(delta.get("content", "") for delta in deltas)


END = b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (("a\\ud83d", "\\ude00b"), "a😀b"),
        (("\\ud83d", "", "\\ude00"), "😀"),
        (("\\ud83d", "\\ude00\\ud83d", "\\ude00"), "😀😀"),
        (("\\ud83d\\ude00",), "😀"),
        (("\\ud83d", "x"), "\ufffdx"),
        (("x\\ude00",), "x\ufffd"),
        (("\\ud83dx",), "\ufffdx"),
        (("\\ud83d\\ud83d", "\\ude00"), "\ufffd😀"),
        (("x\\ud83d",), "x\ufffd"),
    ],
)
def test_split_characters_are_joined(contents: tuple[str, ...], text: str) -> None:
    assert text_of(*map(event, contents), END) == text


def test_a_half_is_not_joined_with_another_text() -> None:
    decoder = EventDecoder()
    assert decoder.read(b'{"a": "\\ud83d", "b": "x"}') == {"a": "", "b": "x"}
    assert decoder.read(b'{"b": "\\ude00"}') == {"a": "\ufffd", "b": "\ufffd"}


@pytest.mark.parametrize("data", [b"{", b'{"a": "\\u12"}', b'["\\ud83d"]', b'{"a": "\\ud83d"' + b', "b": [' * 5000])
def test_a_non_event_is_undecodable(data: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, RecursionError)):
        EventDecoder().read(data)
