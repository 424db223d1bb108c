"""OpenAI's requirements for the examples in a file for chat fine-tuning."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from ledger.training.conversation import Conversation, ExcludedFromExport, Message

MIN_EXAMPLES: Final = 10  # in a file
_TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check(conversation: Conversation) -> None:
    """Raise ExcludedFromExport, naming the rule, if the conversation breaks one."""
    known = {tool["function"]["name"] for tool in conversation.tools}
    unanswered: set[str] = set()
    for message in conversation.messages:
        _check_order(message, unanswered)
        if message["role"] == "tool":
            unanswered.remove(message["tool_call_id"])
        if not message.get("tool_calls") and not message.get("content", "").strip():
            raise ExcludedFromExport("empty_message")
        unanswered |= _check_calls(message.get("tool_calls", ()), known)


def _check_order(message: Message, unanswered: Collection[str]) -> None:
    """Check that all calls, and nothing else, are answered by the messages right after them."""
    if message["role"] == "tool" and message.get("tool_call_id") not in unanswered:
        raise ExcludedFromExport("answer_without_call")
    if message["role"] != "tool" and unanswered:
        raise ExcludedFromExport("call_without_answer")


def _check_calls(calls: Sequence[dict[str, Any]], known: Collection[str]) -> set[str]:
    ids = [call["id"] for call in calls]
    if len(set(ids)) < len(ids):
        raise ExcludedFromExport("call_ids_not_unique")
    for call in calls:
        function = call["function"]
        if function["name"] not in known or not _TOOL_NAME.fullmatch(function["name"]):
            raise ExcludedFromExport("unknown_tool")
        try:
            json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise ExcludedFromExport("arguments_not_json") from error
    return set(ids)
