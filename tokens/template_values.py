"""How large a value of a chat template can be, and what it is a part of: the arithmetic of ``template_proof``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from jinja2 import nodes

MAX_RANGE: Final = 2048  # turns of a loop that only counts
MAX_PATTERN_CHARS: Final = 40
AS_TEXT: Final = 4.0  # how many times as long as in the request's body something may be, as a text or as JSON
TOOLS: Final = "tools"  # at most 128 of them: the one thing that may be gone over for each message
ROWS: Final = frozenset({"messages", TOOLS})


class CostUnknown(Exception):
    """The template does something whose cost is not known."""


@dataclass(frozen=True)
class Value:
    """The most that an expression can be."""

    weight: float = 0.0
    level: float = math.inf  # it is a part of what the loop of this depth is at; inf: it is in the template itself
    is_number: bool = False
    is_text: bool = False
    is_rows: bool = False  # one of the lists whose length the gateway bounds
    of_tools: bool = False
    is_repeated: bool = False  # a part of the tools, while each message goes over them
    gathered: tuple[str, ...] = ()  # what it holds of namespaces
    is_grown: bool = False  # and something else was done with that than to put it before or after other texts


NUMBER: Final = Value(is_number=True)


def joined(given: Iterable[Value]) -> Value:
    """Several values put together."""
    values = list(given)
    return Value(
        sum(value.weight for value in values),
        min((value.level for value in values), default=math.inf),
        is_number=bool(values) and all(value.is_number for value in values),
        is_text=any(value.is_text for value in values),
        is_repeated=any(value.is_repeated for value in values),
        gathered=tuple(name for value in values for name in value.gathered),
        is_grown=any(value.is_grown for value in values),
    )


def either(values: Sequence[Value]) -> Value:
    """One of several values."""
    is_text = all(value.is_text for value in values)
    return replace(joined(values), weight=max(value.weight for value in values), is_number=False, is_text=is_text)


def of_input() -> Value:
    """Something of the conversation."""
    return Value(weight=1.0, level=0.0)


def of_text(text: str) -> Value:
    """A text of the template's own."""
    return Value(
        weight=len(text) / 4096, is_text=True
    )  # templates are longer than their texts, and conversations have some size


def as_text(value: Value) -> Value:
    """A value as it is written: a list or an object as Python's own notation, which escapes."""
    if value.is_text or value.is_number:
        return value
    return replace(value, weight=value.weight * AS_TEXT, is_text=True, is_rows=False)


def names_of(target: nodes.Node) -> list[str]:
    """The names that a loop or an assignment sets. Raises CostUnknown."""
    if isinstance(target, nodes.Name):
        return [target.name]
    if isinstance(target, nodes.Tuple):
        return [name for item in target.items for name in names_of(item)]
    raise CostUnknown(type(target).__name__)


def is_call_of(node: nodes.Node, name: str) -> bool:
    """Whether an expression calls the function of that name."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def size_of_constant(node: nodes.Node) -> float:
    """By how much an argument of a filter may lengthen what comes out. Raises CostUnknown."""
    if isinstance(node, nodes.Tuple):
        return sum(map(size_of_constant, node.items))
    if not isinstance(node, nodes.Const):
        raise CostUnknown("an argument that is made")
    if isinstance(node.value, str):
        return float(len(node.value))
    return float(abs(node.value)) if isinstance(node.value, int) else 0.0


def growth_by_replacing(arguments: Sequence[nodes.Expr]) -> float:
    """How many times as long a text is after a replacement. Raises CostUnknown."""
    if len(arguments) != 2 or not all(isinstance(one, nodes.Const) and isinstance(one.value, str) for one in arguments):
        raise CostUnknown("replace with what is made")
    old, new = (str(one.value) for one in arguments if isinstance(one, nodes.Const))
    return max(1.0, len(new) / len(old)) if old else 1.0 + len(new)


def is_plain_pattern(node: nodes.Node) -> bool:
    """Whether a time is written in a fixed width."""
    pattern = node.value if isinstance(node, nodes.Const) else None
    return isinstance(pattern, str) and len(pattern) < MAX_PATTERN_CHARS and not any(map(str.isdigit, pattern))


def is_short(node: nodes.Node) -> bool:
    """Whether a bound of a range is a small number, or the length of one of the lists."""
    if isinstance(node, nodes.Const):
        return isinstance(node.value, int) and abs(node.value) <= MAX_RANGE
    if isinstance(node, nodes.Filter):
        return node.name in {"length", "count"} and isinstance(node.node, nodes.Name) and node.node.name in ROWS
    if isinstance(node, nodes.Sub | nodes.Add):
        return is_short(node.left) and is_short(node.right)
    return isinstance(node, nodes.Neg) and is_short(node.node)
