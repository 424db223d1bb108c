"""What is wrong with a configuration, in words that name its keys."""

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel


def explain(problem: Mapping[str, Any], root: type[BaseModel], engines: Mapping[str, type[BaseModel]]) -> str:
    """Say what is wrong with which key of ``root``; ``engines`` are the settings of a pool's engine by their kind."""
    keys = keys_of(problem)
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"there is no such key; there are: {', '.join(_keys_beside(problem['loc'], root, engines))}"
    elif problem["type"] == "union_tag_not_found":
        message = f"'kind' is required: {', '.join(engines)}"
    return f"{'.'.join(keys)}: {message}" if keys else message


def keys_of(problem: Mapping[str, Any]) -> list[str]:
    """Return the way to the key at fault."""
    # A tagged union's tag stands in the location between "engine" and the key; it is no key of the file.
    parts = problem["loc"]
    return [str(part) for n, part in enumerate(parts) if n != 3 or parts[0] != "pools" or parts[2] != "engine"]


def _keys_beside(
    location: Sequence[int | str], root: type[BaseModel], engines: Mapping[str, type[BaseModel]]
) -> list[str]:
    """The keys that exist where the last one of ``location`` does not."""
    here: Any = root
    for part in location[:-1]:
        if isinstance(here, UnionType):
            here = engines[str(part)]
        elif get_origin(here) is dict:
            here = get_args(here)[1]
        else:
            here = here.model_fields[str(part)].annotation
            if NoneType in get_args(here):
                here = get_args(here)[0]
    return list(here.model_fields)
