"""The parameters of an SDK, from its types, each with an example value."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import (
    get_type_hints,
    is_typeddict,
)

TAGS: Final = ("type", "role")  # the discriminator fields
WRONG: Final = ({"no": "such"}, True)  # at least one of these has a wrong type

Wrap = Callable[[Any], Any]
Examples = Mapping[str, Any]  # example values by path


class Known(NamedTuple):
    """A parameter, a nested field, or one of its values."""

    top: str  # the parameter
    where: str  # path of the parent object; "" for a parameter
    name: str  # name of the field, or the value
    value: Any  # the parameter with this field or value
    wrong: Any = None  # the same with a wrong type; None: every type is allowed

    @property
    def path(self) -> str:
        return f"{self.where}.{self.name}".strip(".")


class Walk:
    """Collects everything in an SDK type, as deep as ``goes_on`` allows."""

    def __init__(self, kind: Any, examples: Examples, goes_on: Callable[[Known], bool]) -> None:
        self._kind = kind
        self._examples = examples
        self._goes_on = goes_on

    def __iter__(self) -> Iterator[Known]:
        for name, hint in _fields(self._kind).items():
            known = Known(name, "", name, self._sample(hint, name), wrong_of(hint))
            yield known
            if self._goes_on(known):
                yield from self._within(name, hint, name, lambda value: value)

    def _within(self, top: str, hint: Any, where: str, wrap: Wrap) -> Iterator[Known]:
        for kind in _members(hint):
            if is_typeddict(kind):
                yield from self._objects(top, kind, where, wrap)
            elif (item := _item_of(kind)) is not None:
                yield from self._within(top, item, f"{where}[]", lambda value: wrap([value]))
            elif get_origin(kind) is Literal:
                yield from (Known(top, where, str(value), wrap(value)) for value in get_args(kind))

    def _objects(self, top: str, kind: Any, where: str, wrap: Wrap) -> Iterator[Known]:
        tag, values = _tag_of(kind)
        if tag is None:
            yield from self._fields_of(top, kind, where, wrap, {})
            return
        for value in values:
            inside = f"{where.removesuffix('[]')}[{value}]"
            known = Known(top, f"{where}.{tag}", value, wrap(self._minimal(kind, inside, {tag: value})))
            yield known
            if self._goes_on(known):
                yield from self._fields_of(top, kind, inside, wrap, {tag: value})

    def _fields_of(self, top: str, kind: Any, where: str, wrap: Wrap, tag: Mapping[str, str]) -> Iterator[Known]:
        for name, hint in _fields(kind).items():
            if name in tag:
                continue

            def put(value: Any, name: str = name) -> Any:
                return wrap({**self._minimal(kind, where, tag), name: value})

            path, wrong = f"{where}.{name}", wrong_of(hint)
            known = Known(top, where, name, put(self._sample(hint, path)), None if wrong is None else put(wrong))
            yield known
            if self._goes_on(known):
                yield from self._within(top, hint, path, put)

    def _minimal(self, kind: Any, where: str, tag: Mapping[str, str]) -> dict[str, Any]:
        """Return an object with its required fields."""
        given = self._examples.get(where)
        if given is not None:
            return {**given, **tag}
        needed = {name: hint for name, hint in _fields(kind).items() if _is_required(kind, name) and name not in tag}
        return {**tag, **{name: self._sample(hint, f"{where}.{name}") for name, hint in needed.items()}}

    def _sample(self, hint: Any, path: str) -> Any:
        if path in self._examples:
            return self._examples[path]
        kind = _members(hint)[0]
        if is_typeddict(kind):
            tag, values = _tag_of(kind)
            inside = f"{path.removesuffix('[]')}[{values[0]}]" if values else path
            return self._minimal(kind, inside, {} if tag is None else {tag: values[0]})
        if (item := _item_of(kind)) is not None:
            return [self._sample(item, f"{path}[]")]
        if get_origin(kind) is Literal:
            return get_args(kind)[0]
        return {int: 1, float: 0.5, bool: True, str: "x"}.get(kind, {"a": "b"})


@cache  # most of a walk's time
def _fields(kind: Any, *, with_extras: bool = False) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=with_extras)


def _is_required(kind: Any, name: str) -> bool:
    hint = _fields(kind, with_extras=True)[name]
    origin: Any = get_origin(hint)
    while origin is Annotated:
        hint = get_args(hint)[0]
        origin = get_origin(hint)
    return bool(origin is Required)


def _members(hint: Any) -> list[Any]:
    """Return the types of a union, without None."""
    origin = get_origin(hint)
    if origin in {Annotated, Required, NotRequired}:
        return _members(get_args(hint)[0])
    if origin in {Union, UnionType}:
        return [kind for member in get_args(hint) for kind in _members(member)]
    return [] if hint is NoneType else [hint]


def _item_of(kind: Any) -> Any:
    """Return the item type of a list; None if it is not a list."""
    arguments = get_args(kind)
    is_list = len(arguments) == 1 and get_origin(kind) is not Literal
    return arguments[0] if is_list else None


def _tag_of(kind: Any) -> tuple[str | None, tuple[str, ...]]:
    for name in TAGS:
        for hint in _members(_fields(kind).get(name, NoneType)):
            if get_origin(hint) is Literal:
                return name, get_args(hint)
    return None, ()


def wrong_of(hint: Any) -> Any:
    """Return a value of a type that ``hint`` does not allow; None if it allows every type."""
    kinds = _members(hint)
    if object in kinds:
        return None
    takes_objects = any(is_typeddict(kind) or get_origin(kind) is dict for kind in kinds)
    if not takes_objects:
        return WRONG[0]
    return None if bool in kinds else WRONG[1]
