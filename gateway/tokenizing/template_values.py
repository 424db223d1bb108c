"""Bounds for the size of a chat template's values, and their origin: the arithmetic of ``template_proof``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from jinja2 import nodes

MAX_RANGE: Final = 2048  # iterations of a loop over a range
MAX_PATTERN_CHARS: Final = 40
AS_TEXT: Final = 4.0  # maximum growth of a value from the request's body to a text or JSON
TOOLS: Final = "tools"  # at most 128: the only list that may be iterated for each message
ROWS: Final = frozenset({"messages", TOOLS})


class CostUnknown(Exception):
    """The template does something with unknown cost."""


@dataclass(frozen=True)
class Value:
    """The bound of an expression."""

    weight: float = 0.0
    level: float = math.inf  # part of the current item of the loop at this depth; inf: of the template itself
    is_number: bool = False
    is_text: bool = False
    is_rows: bool = False  # a list with a length bounded by the gateway
    of_tools: bool = False
    is_repeated: bool = False  # a part of the tools, inside a loop over them for each message
    gathered: tuple[str, ...] = ()  # the namespaces' fields it contains
    is_grown: bool = False  # these were used other than by concatenation


NUMBER: Final = Value(is_number=True)


def joined(given: Iterable[Value]) -> Value:
    """Return the bound of several values joined."""
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
    """Return the bound of any one of several values."""
    is_text = all(value.is_text for value in values)
    return replace(joined(values), weight=max(value.weight for value in values), is_number=False, is_text=is_text)


def of_input() -> Value:
    """Return the bound of a part of the conversation."""
    return Value(weight=1.0, level=0.0)


def of_text(text: str) -> Value:
    """Return the bound of a literal text of the template."""
    return Value(
        weight=len(text) / 4096, is_text=True
    )  # templates are longer than their texts, and conversations have some size


def as_text(value: Value) -> Value:
    """Return the bound of a value as output: lists and objects become Python's notation, with escapes."""
    if value.is_text or value.is_number:
        return value
    return replace(value, weight=value.weight * AS_TEXT, is_text=True, is_rows=False)


def names_of(target: nodes.Node) -> list[str]:
    """Return the names that a loop or an assignment sets. Raises CostUnknown."""
    if isinstance(target, nodes.Name):
        return [target.name]
    if isinstance(target, nodes.Tuple):
        return [name for item in target.items for name in names_of(item)]
    raise CostUnknown(type(target).__name__)


def is_call_of(node: nodes.Node, name: str) -> bool:
    """Report whether an expression calls the function of that name."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def size_of_constant(node: nodes.Node) -> float:
    """Return by how much an argument of a filter may lengthen the result. Raises CostUnknown."""
    if isinstance(node, nodes.Tuple):
        return sum(map(size_of_constant, node.items))
    if not isinstance(node, nodes.Const):
        raise CostUnknown("a computed argument")
    if isinstance(node.value, str):
        return float(len(node.value))
    return float(abs(node.value)) if isinstance(node.value, int) else 0.0


def growth_by_replacing(arguments: Sequence[nodes.Expr]) -> float:
    """Return the factor by which a replacement may lengthen a text. Raises CostUnknown."""
    if len(arguments) != 2 or not all(isinstance(one, nodes.Const) and isinstance(one.value, str) for one in arguments):
        raise CostUnknown("replace with a computed argument")
    old, new = (str(one.value) for one in arguments if isinstance(one, nodes.Const))
    return max(1.0, len(new) / len(old)) if old else 1.0 + len(new)


def is_plain_pattern(node: nodes.Node) -> bool:
    """Report whether a time is formatted in a fixed width."""
    pattern = node.value if isinstance(node, nodes.Const) else None
    return isinstance(pattern, str) and len(pattern) < MAX_PATTERN_CHARS and not any(map(str.isdigit, pattern))


def is_short(node: nodes.Node) -> bool:
    """Report whether a bound of a range is a small number, or the length of one of the lists."""
    if isinstance(node, nodes.Const):
        return isinstance(node.value, int) and abs(node.value) <= MAX_RANGE
    if isinstance(node, nodes.Filter):
        return node.name in {"length", "count"} and isinstance(node.node, nodes.Name) and node.node.name in ROWS
    if isinstance(node, nodes.Sub | nodes.Add):
        return is_short(node.left) and is_short(node.right)
    return isinstance(node, nodes.Neg) and is_short(node.node)
