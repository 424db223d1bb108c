"""The caller's word for whom he asks, as it is kept so that this person's payloads can be found."""

import hashlib
from typing import Final

MAX_CHARS: Final = 256


def stored_end_user(user: str | None) -> str | None:
    """The OpenAI field ``user`` as it was given; a hash of one that is too long for an index, or unprintable."""
    if user is None or (len(user) <= MAX_CHARS and user.isprintable()):
        return user
    return "sha256:" + hashlib.sha256(user.encode(errors="surrogatepass")).hexdigest()
