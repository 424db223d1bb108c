"""The formats of training sets: one conversation, one line of JSON."""

import json
from collections.abc import Callable
from typing import Any, Final

from ledger.training.conversation import Conversation, ExcludedFromExport, Message

_SPEAKERS: Final = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def openai_example(conversation: Conversation) -> dict[str, Any]:
    """Return OpenAI's format for chat fine-tuning: the body of a request, the answer as its last message."""
    example: dict[str, Any] = {"messages": conversation.messages}
    if conversation.tools:
        example["tools"] = conversation.tools
        if conversation.parallel_tool_calls is not None:
            example["parallel_tool_calls"] = conversation.parallel_tool_calls
    return example


def sharegpt_example(conversation: Conversation) -> dict[str, Any]:
    """Return ShareGPT's format, with LLaMA-Factory's turns for tools: human or observation, then gpt or function_call.

    The system message comes first; consecutive messages of one side become one turn.
    """
    turns: list[dict[str, str]] = []
    for message in conversation.messages:
        turn = {"from": _speaker(message), "value": _value(message)}
        if turn["from"] == "system" and turns and turns[-1]["from"] != "system":
            raise ExcludedFromExport("system_in_the_middle")
        if turns and turns[-1]["from"] == turn["from"]:
            if turn["from"] == "function_call":
                raise ExcludedFromExport("calls_without_answer")
            turns[-1]["value"] += "\n\n" + turn["value"]
        else:
            turns.append(turn)
    _check_turns([turn["from"] for turn in turns if turn["from"] != "system"])
    example: dict[str, Any] = {"conversations": turns}
    if conversation.tools:
        example["tools"] = json.dumps([tool["function"] for tool in conversation.tools], ensure_ascii=False)
    return example


def _speaker(message: Message) -> str:
    if not message.get("tool_calls"):
        return _SPEAKERS[message["role"]]
    if message.get("content", "").strip():
        raise ExcludedFromExport("text_beside_calls")  # the format cannot hold both
    return "function_call"


def _value(message: Message) -> str:
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"] or "{}")}
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return str(message["content"])
    return json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)


def _check_turns(speakers: list[str]) -> None:
    sides = [speaker in {"gpt", "function_call"} for speaker in speakers]
    if any(is_answer != bool(place % 2) for place, is_answer in enumerate(sides)):
        raise ExcludedFromExport("turns_do_not_alternate")


FORMATS: Final[dict[str, Callable[[Conversation], dict[str, Any]]]] = {
    "openai": openai_example,
    "sharegpt": sharegpt_example,
}
