"""The words that servers use to report how an answer ended."""

import logging
from typing import Final, Literal

from pool_worker.engines.framing import MalformedEvent, ServerFailure

EndReason = Literal["stop", "length", "content_filter"]

# In lower case, letters only. A choice that calls tools has stopped.
_ENDS: Final[dict[str, EndReason]] = {
    **dict.fromkeys(
        ("stop", "stopped", "stopsequence", "eos", "eostoken", "endturn", "end", "endofturn", "done", "complete"),
        "stop",
    ),
    **dict.fromkeys(
        ("completed", "finish", "finished", "success", "tooluse", "toolcall", "toolcalls", "functioncall"), "stop"
    ),
    **dict.fromkeys(
        ("length", "maxtokens", "maxlength", "maxoutputtokens", "maxnewtokens", "modellength", "limit"), "length"
    ),
    **dict.fromkeys(("modelcontextwindowexceeded", "contextlength", "contextlengthexceeded"), "length"),
    **dict.fromkeys(
        ("contentfilter", "contentfiltered", "refusal", "safety", "recitation", "blocklist", "spii", "sensitive"),
        "content_filter",
    ),
    **dict.fromkeys(("prohibitedcontent", "modelarmor", "guardrailintervened", "imagesafety"), "content_filter"),
}
# Another attempt may end better.
_FAILURES: Final = frozenset(
    {
        "error",
        "failed",
        "failure",
        "abort",
        "aborted",
        "cancel",
        "cancelled",
        "canceled",
        "timeout",
        "networkerror",
        "engineerror",
        "internalerror",
        "insufficientsystemresource",
        "malformedfunctioncall",
        "malformedmodeloutput",
        "malformedtooluse",
        "unexpectedtoolcall",
        "pauseturn",
        "other",
    }
)
MAX_WORD_CHARS: Final = 64  # in the log
MAX_LOGGED_WORDS: Final = 32

log = logging.getLogger(__name__)
_logged: set[str] = set()


def end_of(word: object) -> EndReason | None:
    """Return how an answer ended; None if it has not.

    An unknown word counts as ``stop`` and is logged once. Raises ServerFailure for a word that means failure, and
    MalformedEvent for a value that is not a word.
    """
    if word is None or word == "":
        return None
    if not isinstance(word, str):
        raise MalformedEvent(f"the finish reason is {str(word)[:MAX_WORD_CHARS]}")
    letters = "".join(filter(str.isalpha, word)).lower()
    if letters in _FAILURES:
        raise ServerFailure(f"the server ended the answer with {word[:MAX_WORD_CHARS]!r}")
    ended = _ENDS.get(letters)
    if ended is None:
        if letters == "null" or not letters:
            return None
        if letters not in _logged and len(_logged) < MAX_LOGGED_WORDS:
            _logged.add(letters)
            log.warning("treating the unknown finish reason %r as a stop", word[:MAX_WORD_CHARS])
        return "stop"
    return ended


def end_of_tokens(word: object) -> Literal["stop", "length"]:
    """Return how a choice ended that the server reports as ended. Raises like ``end_of``."""
    return "length" if end_of(word) == "length" else "stop"
