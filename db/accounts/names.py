"""Names and ids of keys, teams and organisations: how names are stored, and which object a reference means.

A reference that begins like an id means an id and nothing else: deleting by an id never touches another object whose
name is that id. Names that begin so are refused; rows of older releases may still have them, and are reached by their
ids.
"""

import unicodedata
from collections.abc import Iterable
from typing import Final

from db.accounts.errors import InvalidName, NameTaken

MAX_NAME_CHARS: Final = 100
ID_PREFIXES: Final = ("key_", "team_", "org_")


def normalized(name: str) -> str:
    """Return a name without space around it, in Unicode's form NFC: names that look the same are the same."""
    return unicodedata.normalize("NFC", name).strip()


def checked_name(name: str) -> str:
    """Return a name as it is stored. Raises InvalidName."""
    name = normalized(name)
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidName("name", f"must have 1 to {MAX_NAME_CHARS} printable characters")
    if name.casefold().startswith(ID_PREFIXES):
        raise InvalidName("name", f"must not begin like an id: {', '.join(ID_PREFIXES)}")
    if "/" in name or name in {".", ".."}:
        raise InvalidName("name", "must not contain a slash, nor be . or .., because names are parts of URLs")
    return name


def is_id(reference: str) -> bool:
    """Return whether a reference can only mean an id, or the beginning of one."""
    return reference.startswith(ID_PREFIXES)


def means(reference: str, object_id: str, name: str) -> bool:
    """Return whether a reference means the object of this id and name."""
    return object_id == reference if is_id(reference) else normalized(name) == normalized(reference)


def not_found(kind: str, reference: str, ids_by_name: Iterable[tuple[str, str]] = ()) -> str:
    """Return the message for a reference that means nothing; ``ids_by_name`` are pairs of a name and its id."""
    for name, object_id in ids_by_name:
        if name == reference:
            return f"no {kind} has the id {reference!r}; the one of this name has the id {object_id}"
    return f"no {kind} has the id or name {reference!r}"


def must_be_free(name: str, names: Iterable[str], message: str) -> None:
    """Raise NameTaken if one of ``names`` looks the same. The unique index cannot tell: older rows have other forms."""
    if any(normalized(other) == name for other in names):
        raise NameTaken(message)
