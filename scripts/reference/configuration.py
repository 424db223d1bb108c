"""docs/reference/configuration.md: every key of spillway.toml, from the settings and ``meanings.toml``."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

import gateway.settings
from pool_worker.settings import ChatEngineSettings, ConnectionSettings
from spillway.config import Config

MEANINGS: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(Path(__file__).with_name("meanings.toml").read_text())
INTRO: Final = Path(__file__).with_name("configuration.md").read_text()
# Bases of engines whose keys are listed once.
SHARED: Final[Mapping[type[BaseModel], str]] = {
    ConnectionSettings: "engines that ask a server",
    ChatEngineSettings: "engines that ask a server by messages",
}
SAME_NAMES: Final[Mapping[type[BaseModel], str]] = {  # names in meanings.toml of classes that share theirs
    gateway.settings.ConnectionSettings: "gateway.ConnectionSettings",
    ConnectionSettings: "EngineConnectionSettings",
}
A_YEAR_S: Final = 31_536_000
NOTHING: Final = "–"  # noqa: RUF001  # people read an en dash as "none"
PLACEHOLDER: Final = "<name>"
UNITS: Final = {
    "_ms": "milliseconds",
    "_s": "seconds",
    "_hours": "hours",
    "_days": "days",
    "_bytes": "bytes",
    "_mib": "MiB",
    "_gib": "GiB",
    "_usd": "USD",
    "usd_per_day": "USD",
    "usd_per_month": "USD",
    "usd_per_hour": "USD",
    "tokens_per_s": "tokens per second",
}


class Section(NamedTuple):
    """One table of the page."""

    path: str  # dotted, as TOML writes it
    model: type[BaseModel]
    kind: str = ""  # of a variant, by its key `kind`


def configuration_page() -> str:
    """Return the whole page. Raises KeyError for a key without a meaning."""
    return INTRO + "".join(_table(section) for section in sections())


def meanings_without_key() -> list[str]:
    """Return the entries of meanings.toml that no setting has."""
    known = {name for section in sections() for name in _own_fields(section)}
    return [
        f"{model}.{key}" for model, keys in MEANINGS.items() for key in keys if key != "_" and (model, key) not in known
    ]


def sections() -> list[Section]:
    """Return all sections, outer ones first."""
    return list(_below(Section("", Config)))


def _below(section: Section) -> Iterator[Section]:
    yield section
    for name, info in section.model.model_fields.items():
        path = f"{section.path}.{name}".lstrip(".")
        found = list(_models(info.annotation, path))
        if len(found) > 1:
            yield from _variants(found)
        else:
            for inner_path, model in found:
                yield from _below(Section(inner_path, model))


def _variants(found: list[tuple[str, type[BaseModel]]]) -> Iterator[Section]:
    shared: set[type[BaseModel]] = set()
    for path, model in found:
        for base, kind in SHARED.items():
            if issubclass(model, base) and base not in shared:
                shared.add(base)
                yield Section(path, base, kind)
        kinds = get_args(model.model_fields["kind"].annotation)
        yield from _below(Section(path, model, f"kind = {' or '.join(map(json.dumps, kinds))}"))


def _models(annotation: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:  # noqa: ANN401  # any type
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, annotation
    elif origin is dict:
        yield from _models(arguments[1], f"{path}.{PLACEHOLDER}")
    elif origin is tuple:
        yield from _models(arguments[0], f"[{path}]")
    elif origin in {Union, UnionType, Annotated}:
        for argument in arguments:
            yield from _models(argument, path)


def _name(model: type[BaseModel]) -> str:
    """Return a class's name in meanings.toml."""
    return SAME_NAMES.get(model, model.__name__)


def _own_fields(section: Section) -> dict[tuple[str, str], FieldInfo]:
    """Return the values of a section by the class that has their meaning, without those of a shared base."""
    fields: dict[tuple[str, str], FieldInfo] = {}
    for name, info in section.model.model_fields.items():
        if name == "kind" or list(_models(info.annotation, "")):
            continue
        owners = [one for one in section.model.__mro__ if name in MEANINGS.get(_name(one), {})]
        if not owners:
            raise KeyError(f"scripts/reference/meanings.toml: [{_name(section.model)}] {name} is missing")
        if owners[0] not in SHARED or owners[0] is section.model:
            fields[_name(owners[0]), name] = info
    return fields


def _table(section: Section) -> str:
    kind = f", {section.kind}" if section.kind else ""
    title = f"`[{section.path}]`{kind}" if section.path else "Top level"
    lines = [f"\n## {title}\n\n{MEANINGS[_name(section.model)]['_']}\n"]
    if fields := _own_fields(section):
        lines.append("\n| key | type | default | meaning |\n|---|---|---|---|\n")
        lines += [
            f"| `{name}` | {_type(name, info)} | {_default(name, info)} | {MEANINGS[owner][name]} |\n"
            for (owner, name), info in fields.items()
        ]
    return "".join(lines)


def _type(name: str, info: FieldInfo) -> str:
    text = _type_name(info.annotation)
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), None)
    if unit is not None and text in {"integer", "number"}:
        text = unit
    bounds = [_bound(constraint) for constraint in _metadata(info)]
    return ", ".join([text, *filter(None, bounds)])


def _metadata(info: FieldInfo) -> list[Any]:
    found = list(info.metadata)
    for argument in get_args(info.annotation):
        if get_origin(argument) is Annotated:
            for meta in get_args(argument)[1:]:
                found += meta.metadata if isinstance(meta, FieldInfo) else [meta]
    return found


def _bound(constraint: object) -> str:
    match constraint:
        case Gt(gt=bound):
            text = f"> {_number(bound)}"
        case Ge(ge=bound):
            text = f"≥ {_number(bound)}"
        case Lt(lt=bound):
            text = f"< {_number(bound)}"
        case Le(le=bound) if bound != A_YEAR_S:  # the limit of every timer
            text = f"≤ {_number(bound)}"
        case MinLen():
            text = "not empty"
        case _:
            text = ""
    return text


def _type_name(annotation: Any) -> str:  # noqa: ANN401  # any type
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in {Union, UnionType}:
        names = dict.fromkeys(_type_name(argument) for argument in arguments if argument is not NoneType)
        return " or ".join(names)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"table of {_type_name(arguments[1])}"
    return _plain_name(annotation)


def _plain_name(kind: Any) -> str:  # noqa: ANN401  # a class
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f"`{json.dumps(one.value)}`" for one in kind)
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "secret"}
    other = {"time": "time", "ZoneInfo": "time zone", "IPv4Network": "network", "IPv6Network": "network"}
    return names.get(kind) or other.get(getattr(kind, "__name__", ""), "any")


def _default(name: str, info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.default
    if info.default_factory is not None or value is None or value in ((), {}, ""):
        return NOTHING
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, int | float):
        return f"`{_number(value)}`{_readable(name, value)}"
    if isinstance(value, tuple):
        items = [one if isinstance(one, int | float) else str(one) for one in value]
        return f"`{json.dumps(items, ensure_ascii=False)}`"
    return f"`{json.dumps(str(value), ensure_ascii=False)}`"


def _number(value: Any) -> str:  # noqa: ANN401  # a bound, or a value
    return str(int(value)) if float(value).is_integer() else str(value)


def _readable(name: str, value: float) -> str:
    """Return a large value in a larger unit, in parentheses."""
    scales = {
        "_bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")),
        "_s": ((86_400, "d"), (3600, "h"), (60, "min")),
    }
    for end, steps in scales.items():
        if name.endswith(end):
            for size, unit in steps:
                if value >= size and value % size == 0:
                    return f" ({_number(value / size)} {unit})"
    return ""
