"""Error messages for an invalid configuration, which name its keys."""

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

from spillway.config_values import variable_of

_UNIONS: Final = (["engine"], ["fleet", "driver"])  # below a pool


def explain(problem: Mapping[str, Any], root: type[BaseModel], engines: Mapping[str, type[BaseModel]]) -> str:
    """Return the message for a problem in ``root``; ``engines`` are the settings of a pool's engine by kind."""
    keys = keys_of(problem)
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"unknown key; valid keys: {', '.join(_valid_keys(problem['loc'], root, engines))}"
    elif problem["type"] == "union_tag_not_found":
        message = f"'kind' is required: {', '.join(engines)}"
    return f"{'.'.join(keys)}: {message}" if keys else message


def source_of(keys: Sequence[str], where: str, env: Mapping[str, str]) -> str:
    """Return the variable that holds the invalid value of a key, or else ``where``."""
    variable = variable_of(keys)
    return f"environment: {variable}" if variable in env else where


def keys_of(problem: Mapping[str, Any]) -> list[str]:
    """Return the path to the invalid key."""
    # The location has a tagged union's tag between the union and the key; the tag is not a key of the file.
    parts = [str(part) for part in problem["loc"]]
    tag = next(
        (2 + len(union) for union in _UNIONS if parts[:1] == ["pools"] and parts[2 : 2 + len(union)] == union), None
    )
    return [part for n, part in enumerate(parts) if n != tag]


def _valid_keys(
    location: Sequence[int | str], root: type[BaseModel], engines: Mapping[str, type[BaseModel]]
) -> list[str]:
    """Return the valid keys in place of the last one of ``location``."""
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
