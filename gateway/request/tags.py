"""Tags of a request, for grouping in reports: from the header ``x-spillway-tags`` and the body's ``metadata``.

Both have the bounds of OpenAI's ``metadata``. A tag of the body overrides one of the same name in the header.
"""

from typing import Final

from gateway.errors import InvalidParameter
from protocol.usage import MAX_TAG_NAME_CHARS, MAX_TAG_VALUE_CHARS, MAX_TAGS, Tags

TAGS_HEADER: Final = "x-spillway-tags"


def header_tags(text: str | None) -> Tags | None:
    """Parse the header: ``team=search,feature=autocomplete``. Raises InvalidParameter."""
    if not text:
        return None
    if not text.isascii():
        wanted = f"'{TAGS_HEADER}' must be ASCII. 'metadata' in the body takes any text."
        raise InvalidParameter(wanted, param=TAGS_HEADER)
    tags: Tags = {}
    for pair in text.split(",", MAX_TAGS):
        name, sign, value = pair.partition("=")
        if not sign:
            wanted = f"'{TAGS_HEADER}' must be name=value pairs, separated by commas."
            raise InvalidParameter(wanted, param=TAGS_HEADER)
        tags[name.strip()] = value.strip()
    _check(tags, TAGS_HEADER)
    return tags


def request_tags(in_header: Tags | None, metadata: Tags | None) -> Tags | None:
    """Return all tags of a request; None: it has none. Raises InvalidParameter."""
    if not metadata:
        return in_header
    _check(metadata, "metadata")
    tags = {**(in_header or {}), **metadata}
    if len(tags) > MAX_TAGS:
        wanted = f"'{TAGS_HEADER}' and 'metadata' may have at most {MAX_TAGS} tags together, not {len(tags)}."
        raise InvalidParameter(wanted, param=TAGS_HEADER)
    return tags


def _check(tags: Tags, param: str) -> None:
    if len(tags) > MAX_TAGS:
        raise InvalidParameter(f"'{param}' may have at most {MAX_TAGS} tags.", param=param)
    for name, value in tags.items():
        if not 0 < len(name) <= MAX_TAG_NAME_CHARS or len(value) > MAX_TAG_VALUE_CHARS:
            wanted = f"names must have 1 to {MAX_TAG_NAME_CHARS} characters, values at most {MAX_TAG_VALUE_CHARS}."
            raise InvalidParameter(f"'{param}': {wanted}", param=param)
        if "\0" in name or "\0" in value:  # PostgreSQL's text cannot hold it
            raise InvalidParameter(f"'{param}': names and values must not contain a NUL character.", param=param)
