"""Each value of a configuration with its origin, with secrets masked."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from pydantic import SecretStr

from db.accounts.masking import MASK, masked
from spillway.config import Config
from spillway.config_values import variable_of
from spillway.otel_variables import VARIABLES

DEFAULT: Final = "default"
_SECRET_TABLES: Final = frozenset({"headers", "env"})  # tables whose values may be secrets


class Value(NamedTuple):
    """One value."""

    key: str  # dotted
    value: Any  # as JSON
    origin: str  # an environment variable, "default", or the ``where`` of the file


def values_of(config: Config, given: Mapping[str, Any], where: str, env: Mapping[str, str]) -> Iterator[Value]:
    """Yield the values of a configuration. ``given``: the content of its file; ``where``: the file's name."""
    for keys, value in _leaves(config, ()):
        yield Value(".".join(keys), value, _origin(keys, given, where, env))


def _origin(keys: tuple[str, ...], given: Mapping[str, Any], where: str, env: Mapping[str, str]) -> str:
    for length in range(len(keys), 0, -1):  # a variable may hold a whole table, as JSON
        if (variable := variable_of(keys[:length])) in env:
            return variable
    if _is_in(given, keys):
        return where
    section, *rest = keys
    variable = VARIABLES.get(rest[0], "") if section == "telemetry" and rest else ""
    return variable if variable in env else DEFAULT


def _is_in(given: object, keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(given, Mapping):
            return True  # a list, or a table written in another form
        if key not in given:
            return False
        given = given[key]
    return True


def _leaves(value: object, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values that are set below a value, with their keys."""
    if isinstance(value, Config):
        shown: Mapping[str, Any] = _shown(value)
        for key, below in shown.items():
            yield from _leaves(below, (key,))
    elif isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, (*keys, key))
    elif value is not None and value != {}:
        is_secret = bool(_SECRET_TABLES.intersection(keys[:-1]))
        yield keys, MASK if is_secret else masked(value) if isinstance(value, str) else value


def _shown(config: Config) -> dict[str, Any]:
    shown: dict[str, Any] = _masked(
        config.model_dump(exclude_none=True), config.model_dump(mode="json", exclude_none=True)
    )
    return shown


def _masked(python: Any, json: Any) -> Any:  # noqa: ANN401  # any value
    """Return the JSON form of a value with its secrets masked; its Python form shows which values are secrets."""
    if isinstance(python, SecretStr):
        return MASK
    if isinstance(python, Mapping):
        return {str(key): _masked(python[key], json[str(key)]) for key in python}
    if isinstance(python, list | tuple):
        return [_masked(one, other) for one, other in zip(python, json, strict=True)]
    return masked(json) if isinstance(json, str) else json
