"""Masking of secrets in texts that people read: logs, answers, traces.

Clients put keys in the wrong places: a URL's path, a model's name, a header. Upstream servers repeat a rejected key in
their errors. Anything that looks like a key is masked before the text leaves Spillway.
"""

import re
from typing import Final

MIN_SECRET_CHARS: Final = 16  # after the prefix; words and versions are shorter
MASK: Final = "***"

# Prefixes of the keys of Spillway's API and of the APIs that it calls.
_PREFIXES: Final = (
    "sk-", "sk_", "pk-", "gsk_", "csk-", "xai-", "pplx-", "nvapi-", "fw_", "tgp_v1_", "hf_", "r8_", "rpa_", "whsec_",
    "ghp_", "github_pat_", "AIza", "AKIA", "ASIA", "ya29.",
)  # fmt: skip
# Not inside a word, as in "task-"; but behind an escape of a URL, of JSON or of a terminal.
_BEGIN: Final = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt])|(?<=\x1b\[\dm)|(?<=\x1b\[\d\dm))"
# Linear time for every text: no unbounded repetition is followed by something that could fail, except a repetition of
# characters that cannot start another match.
_SECRET: Final = re.compile(
    rf"(?P<ours>sk-sw-)[A-Za-z0-9]{{{MIN_SECRET_CHARS},}}"
    rf"|{_BEGIN}(?P<prefix>{'|'.join(map(re.escape, _PREFIXES))})[\w-]{{{MIN_SECRET_CHARS},}}"
    rf"|(?P<scheme>\b[Bb]earer )[\w.~+/=-]{{{MIN_SECRET_CHARS},}}"
    rf"|(?<![\w-])(?P<token>eyJ)[\w-]{{{MIN_SECRET_CHARS},}}\.[\w-]+(?:\.[\w-]*)?"
    r"|(?P<user>://[^\s/:@]{0,256}:)[^\s/@]{1,256}(?=@)"
)
_MARKS: Final = (*_PREFIXES, "earer ", "eyJ", "://")  # without one of them there is no match


def masked(text: str) -> str:
    """Return a text with everything masked that looks like a key, a token or the password of a URL."""
    if not any(mark in text for mark in _MARKS):  # a tenth of the cost
        return text
    return _SECRET.sub(lambda found: f"{found[found.lastgroup or 0]}{MASK}", text)
