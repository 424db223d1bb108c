"""The end user named by a client, as stored to find this person's payloads."""

import hashlib
from typing import Final

MAX_CHARS: Final = 256


def stored_end_user(user: str | None) -> str | None:
    """Return the OpenAI field ``user`` as given, or a hash of one that is unprintable or too long for an index."""
    if user is None or (len(user) <= MAX_CHARS and user.isprintable()):
        return user
    return "sha256:" + hashlib.sha256(user.encode(errors="surrogatepass")).hexdigest()
