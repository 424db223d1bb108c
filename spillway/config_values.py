"""The values of a configuration: merging file and environment, rejecting placeholders, and revealing secrets.

pydantic masks secrets when it dumps a model. The file that ``spillway up`` writes for its children must hold the real
secrets (``revealed``), and a masked secret in a configuration must not reach a provider (``masked_secrets``).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic_settings.sources import EnvSettingsSource

ENV_PREFIX: Final = "SPILLWAY_"

# Placeholders of other programs for a variable: "${VAR}", "${VAR:-default}", "$VAR", "os.environ/VAR", "env:VAR",
# "{{ env.VAR }}", "%VAR%". Only "${VAR}" is also detected inside a longer value, such as a URL.
_EXPANSION: Final = re.compile(r"\$\{(\w+)[^}]*\}")
_REFERENCE: Final = re.compile(r"\$[A-Z_][A-Z0-9_]*|os\.environ/.*|env:\w+|\{\{.*\}\}|%[A-Z_][A-Z0-9_]*%", re.DOTALL)
_COMMANDS: Final = frozenset({"exec", "command"})  # a shell may expand variables in these values
_MASK: Final = re.compile(r"[\w.-]{0,12}\*{3,}[\w.-]{0,8}")

Path = tuple[str, ...]  # of keys
Problem = tuple[Path, str]  # an invalid key and the message


class MappingEnvSource(EnvSettingsSource):
    """pydantic-settings' environment source, reading a mapping instead of the process's environment."""

    def __init__(self, settings_class: Any, env: Mapping[str, str]) -> None:  # noqa: ANN401  # pydantic-settings' type
        self._given = {name.lower(): value for name, value in env.items()}
        super().__init__(settings_class)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._given


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``over``, recursively."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def spelled_as(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``over``, which comes from the environment, with its keys spelled as in ``base``.

    Names of variables ignore case and, in most shells, cannot contain hyphens or dots. Therefore
    ``SPILLWAY_POOLS__GPT_4O__ENGINE__API_KEY`` sets a key of the pool "gpt-4o". A name that matches two keys of
    ``base`` stays unchanged.
    """
    names: dict[str, list[str]] = {}
    for key in base:
        names.setdefault(_in_variable(key), []).append(key)
    spelled: dict[str, Any] = {}
    for key, value in over.items():
        same = names.get(_in_variable(key), [])
        name = same[0] if key not in base and len(same) == 1 else key
        below = base.get(name)
        spelled[name] = spelled_as(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return spelled


def variable_of(keys: Sequence[str]) -> str:
    """Return the name of the environment variable that overrides a key of the file."""
    return ENV_PREFIX + "__".join(map(_in_variable, keys)).upper()


def unexpanded(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each value that is a placeholder for a variable: Spillway does not expand these."""
    for keys, text in _texts(values, ()):
        expansion = _EXPANSION.search(text)
        if keys[-1] not in _COMMANDS and (expansion or _REFERENCE.fullmatch(text.strip())):
            named = f"${{{expansion[1]}}}" if expansion else text  # the rest of the text may be a secret
            yield (
                keys,
                (
                    f"{named!r} is a variable, and variables are not expanded. Remove this key and set the environment "
                    f"variable {variable_of(keys)}"
                ),
            )


def masked_secrets(model: BaseModel) -> Iterator[Problem]:
    """Yield a problem for each secret that is a masked one, copied from output that masks secrets."""
    for keys, secret in secrets_of(model):
        if _MASK.fullmatch(secret.get_secret_value().strip()):
            yield (
                keys,
                (
                    f"{secret.get_secret_value()!r} is a masked secret. Use the secret itself, or set the environment "
                    f"variable {variable_of(keys)}"
                ),
            )


def secrets_of(value: object, keys: Path = ()) -> Iterator[tuple[Path, SecretStr]]:
    """Yield every secret below a value, with the keys that lead to it."""
    if isinstance(value, SecretStr):
        yield keys, value
    elif isinstance(value, BaseModel):
        for name, below in value:
            yield from secrets_of(below, (*keys, name))
    elif isinstance(value, Mapping):
        for name, below in value.items():
            yield from secrets_of(below, (*keys, str(name)))


def revealed(model: BaseModel) -> dict[str, Any]:
    """Return a model as JSON values, without unset keys and with unmasked secrets."""
    dumped = model.model_dump(mode="json", exclude_none=True)
    for keys, secret in secrets_of(model):
        at = dumped
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = secret.get_secret_value()
    return dumped


def _in_variable(key: str) -> str:
    return re.sub(r"\W", "_", key.lower(), flags=re.ASCII)


def _texts(value: object, keys: Path) -> Iterator[tuple[Path, str]]:
    """Yield each text below ``value`` with its keys. Texts of a list have the keys of the list."""
    if isinstance(value, str):
        yield keys, value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _texts(below, (*keys, str(key)))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _texts(below, keys)
