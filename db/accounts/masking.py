"""Masking of secrets in texts that people read: logs, answers, traces.

Callers put keys in the wrong places: into a URL's path, a model's name, a header. Upstream servers repeat the key that
they refuse. Whatever looks like a key is masked where the text leaves us.
"""

import re
from typing import Final

MIN_SECRET_CHARS: Final = 16  # after the prefix; words and versions are shorter
MASK: Final = "***"

# What begins the keys of the APIs that Spillway has or asks.
_PREFIXES: Final = (
    "sk-", "sk_", "pk-", "gsk_", "csk-", "xai-", "pplx-", "nvapi-", "fw_", "tgp_v1_", "hf_", "r8_", "rpa_", "whsec_",
    "ghp_", "github_pat_", "AIza", "AKIA", "ASIA", "ya29.",
)  # fmt: skip
# Not inside a word, as in "task-"; but behind an escape of a URL, of JSON or of a terminal.
_BEGIN: Final = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt])|(?<=\x1b\[\dm)|(?<=\x1b\[\d\dm))"
# No text makes this slow: nothing that could fail follows an unbounded repetition, except of characters that cannot
# begin another match.
_SECRET: Final = re.compile(
    rf"(?P<ours>sk-sw-)[A-Za-z0-9]{{{MIN_SECRET_CHARS},}}"
    rf"|{_BEGIN}(?P<prefix>{'|'.join(map(re.escape, _PREFIXES))})[\w-]{{{MIN_SECRET_CHARS},}}"
    rf"|(?P<scheme>\b[Bb]earer )[\w.~+/=-]{{{MIN_SECRET_CHARS},}}"
    rf"|(?<![\w-])(?P<token>eyJ)[\w-]{{{MIN_SECRET_CHARS},}}\.[\w-]+(?:\.[\w-]*)?"
    r"|(?P<user>://[^\s/:@]{0,256}:)[^\s/@]{1,256}(?=@)"
)
_MARKS: Final = (*_PREFIXES, "earer ", "eyJ", "://")  # without one of them there is no match


def masked(text: str) -> str:
    """Return a text with all that looks like a key, a token or the password of a URL masked."""
    if not any(mark in text for mark in _MARKS):  # a tenth of the cost
        return text
    return _SECRET.sub(lambda found: f"{found[found.lastgroup or 0]}{MASK}", text)
