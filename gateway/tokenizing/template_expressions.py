"""Bounds for the values of a chat template's expressions: a part of ``template_proof``, which says why."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from jinja2 import nodes

from gateway.tokenizing.template_values import (
    AS_TEXT,
    NUMBER,
    ROWS,
    TOOLS,
    CostUnknown,
    Value,
    as_text,
    either,
    growth_by_replacing,
    is_plain_pattern,
    is_short,
    joined,
    of_input,
    of_text,
    size_of_constant,
)

MAX_WEIGHT: Final = 64.0
MAX_STEPS: Final = 50_000  # of the proof itself: a macro is analyzed at each call
_TIME_CHARS: Final = 100  # of a formatted time

_NUMBERS: Final = {"length", "count", "int", "abs"}
_FREE_FILTERS: Final = {"first", "last", "default", "d", "safe", "items"}
_LISTS: Final = {
    "map": 0,
    "select": 0,
    "reject": 0,
    "selectattr": 1,
    "rejectattr": 1,
}  # index of the applied filter or test
_TEXTS: Final = {"trim", "upper", "lower", "capitalize", "title", "string"}
_CHEAP_FILTERS: Final = _TEXTS | {"list", "reverse", *_LISTS}
_HEAVY_FILTERS: Final = {"tojson": AS_TEXT, "join": AS_TEXT + 1, "dictsort": 1.0, "sort": 1.0, "unique": 1.0}
_FREE_METHODS: Final = {"get", "items", "keys", "values"}
_CHEAP_METHODS: Final = {
    "split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower", "title", "capitalize",
    "find", "count", "index", "removeprefix", "removesuffix", "splitlines",
}  # fmt: skip
_TESTS: Final = {
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float",
    "boolean", "true", "false", "eq", "equalto", "==", "ne", "!=", "in", "sameas", "odd", "even", "gt", "lt", "ge",
    "le",
}  # fmt: skip
_LOOP_NUMBERS: Final = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}


class Expressions:
    """Bounds for a template's expressions at the current statement of the walk."""

    def __init__(self) -> None:
        self.names: dict[str, Value] = {}
        self.macros: dict[str, nodes.Macro] = {}
        self.spaces: set[str] = set()  # names of namespaces
        self.gathered: dict[str, Value] = {}  # "ns.name" → its bound
        self.loops: list[bool] = []  # enclosing loops: whether each iterates over rows
        self.is_written = False  # the current expression is output directly, and counted there
        self._steps = 0
        self._kinds: dict[type[nodes.Node], Callable[[Any], Value]] = {
            nodes.Const: lambda node: of_text(node.value) if isinstance(node.value, str) else NUMBER,
            nodes.TemplateData: lambda node: of_text(node.data),
            nodes.Name: self._name,
            nodes.Getattr: self._attribute,
            nodes.Getitem: self._item,
            nodes.List: lambda node: self._collection(node.items),
            nodes.Tuple: lambda node: self._collection(node.items),
            nodes.Dict: lambda node: self._collection([one for pair in node.items for one in (pair.key, pair.value)]),
            nodes.Not: lambda node: self._truth(node.node),
            nodes.Compare: self._comparison,
            nodes.And: lambda node: either([self.value(node.left), self.value(node.right)]),
            nodes.Or: lambda node: either([self.value(node.left), self.value(node.right)]),
            nodes.CondExpr: self._choice,
            nodes.Add: lambda node: self._sum([self.value(node.left), self.value(node.right)]),
            nodes.Concat: lambda node: replace(
                self._sum([as_text(self.value(one)) for one in node.nodes]), is_number=False
            ),
            nodes.Sub: self._arithmetic,
            nodes.Mod: self._arithmetic,
            nodes.Mul: self._arithmetic,
            nodes.FloorDiv: self._arithmetic,
            nodes.Neg: lambda node: self._grown(self.value(node.node)),
            nodes.Test: self._test,
            nodes.Filter: lambda node: self._grown(self._filter(node)),
            nodes.Call: self._call,
        }

    def value(self, node: nodes.Node) -> Value:
        """Return the bound of an expression. Raises CostUnknown."""
        self.step()
        kind = self._kinds.get(type(node))
        if kind is None:
            raise CostUnknown(f"{type(node).__name__} is not supported")
        return self.limited(kind(node))

    def step(self) -> None:
        """Count a step of the proof. Raises CostUnknown beyond MAX_STEPS."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise CostUnknown("it is too long")

    def limited(self, value: Value) -> Value:
        """Return the value if it is small enough. Raises CostUnknown."""
        if value.weight > MAX_WEIGHT:
            raise CostUnknown("a value may grow large")
        return value

    def macro_call(self, macro: nodes.Macro, given: Sequence[Value], keywords: dict[str, Value]) -> Value:
        """Return the value that a macro writes. Raises CostUnknown."""
        raise NotImplementedError

    # --- names and parts ----------------------------------------------------------------------------------------------

    def _name(self, node: nodes.Name) -> Value:
        name = node.name
        if name in {"varargs", "kwargs", "caller", "self"} or name in self.spaces or name in self.macros:
            raise CostUnknown(f"{name} is used as a value")
        known = self.names.get(name)
        return replace(of_input(), is_rows=name in ROWS, of_tools=name == TOOLS) if known is None else known

    def _attribute(self, node: nodes.Getattr) -> Value:
        if isinstance(node.node, nodes.Name):
            if node.node.name in self.spaces:
                name = f"{node.node.name}.{node.attr}"
                return replace(self.gathered.get(name, Value()), level=0.0, gathered=(name,))
            if node.node.name == "loop" and self.loops:
                return NUMBER if node.attr in _LOOP_NUMBERS else of_input()
        return replace(self._grown(self.value(node.node)), is_rows=False)

    def _item(self, node: nodes.Getitem) -> Value:
        value = self._grown(self.value(node.node))
        if not isinstance(node.arg, nodes.Slice):
            self.value(node.arg)
            return replace(value, is_rows=False)
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            if part is not None:
                self.value(part)
        return self._cheap(value)

    def _collection(self, items: Sequence[nodes.Node]) -> Value:
        return replace(self._grown(joined(map(self.value, items))), is_number=False, is_text=False)

    def _grown(self, value: Value) -> Value:
        return replace(value, is_grown=True) if value.gathered else value

    # --- operators ----------------------------------------------------------------------------------------------------

    def _truth(self, node: nodes.Node) -> Value:
        self.value(node)
        return NUMBER

    def _comparison(self, node: nodes.Compare) -> Value:
        sides = [self.value(node.expr), *[self.value(operand.expr) for operand in node.ops]]
        for operand, side in zip(node.ops, sides[1:], strict=True):
            if operand.op in {"in", "notin"}:
                self._cheap(side)
        return self._compared(sides)

    def _compared(self, sides: Sequence[Value]) -> Value:
        # A comparison reads no more than the shorter one's length.
        if not any(map(self._is_own, sides)):
            self._cheap(joined(sides))
        return NUMBER

    def _choice(self, node: nodes.CondExpr) -> Value:
        self.value(node.test)
        return either([self.value(node.expr1), self.value(node.expr2) if node.expr2 else Value()])

    def _sum(self, parts: list[Value]) -> Value:
        value = joined(parts)
        if value.is_number:
            return value
        added = joined(part for part in parts if not part.gathered)
        # A gathered value is copied in each iteration; only parts of the loop's current item may be added to it.
        self._cheap(added if value.gathered else value)
        if value.gathered and self.loops not in ([], [True]) and not self.is_written:
            raise CostUnknown("a nested loop accumulates in a namespace")
        if self.loops and value.gathered and not self._is_own(added):
            return replace(value, is_grown=True)
        return value

    def _arithmetic(self, node: nodes.BinExpr) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node, nodes.Sub | nodes.FloorDiv):  # not defined for texts
            return NUMBER if not left.gathered + right.gathered else replace(NUMBER, gathered=(), is_grown=True)
        if not (left.is_number and right.is_number):
            raise CostUnknown(f"{type(node).__name__} on a value that may be text")
        if isinstance(node, nodes.Mul) and not any(isinstance(side, nodes.Const) for side in (node.left, node.right)):
            raise CostUnknown("a number may grow large")
        return NUMBER

    def _test(self, node: nodes.Test) -> Value:
        if node.name not in _TESTS:
            raise CostUnknown(f"the test {node.name} is not supported")
        sides = [self.value(one) for one in (node.node, *(node.args or ()))]
        if node.name == "in":
            self._cheap(joined(sides[1:]))
        return self._compared(sides) if len(sides) > 1 else NUMBER

    # --- filters and calls --------------------------------------------------------------------------------------------

    def _filter(self, node: nodes.Filter) -> Value:
        if node.node is None or node.dyn_args is not None or node.dyn_kwargs is not None:
            raise CostUnknown(f"{node.name} has computed arguments")
        value = self.value(node.node)
        arguments = [*node.args, *[keyword.value for keyword in node.kwargs]]
        given = list(map(self.value, arguments))
        if node.name in _NUMBERS:
            if node.name in {"int", "abs"}:  # they scan a text
                self._cheap(value)
            return NUMBER
        if node.name in _FREE_FILTERS:
            return either([value, *given])
        if node.name in _HEAVY_FILTERS:
            factor = _HEAVY_FILTERS[node.name] + sum(map(size_of_constant, arguments))
            is_text = node.name in {"tojson", "join"}
            return replace(self._heavy(value), weight=value.weight * factor, is_rows=False, is_text=is_text)
        if node.name == "replace":
            return self._replaced(as_text(value), arguments)
        if node.name not in _CHEAP_FILTERS:
            raise CostUnknown(f"the filter {node.name} is not supported")
        self._check_applied(node, arguments)
        if node.name in _TEXTS or (node.name == "map" and len(node.args) == 1):
            value = replace(as_text(value), is_rows=value.is_rows, is_text=node.name in _TEXTS)
        return replace(self._cheap(value), is_rows=value.is_rows and node.name not in _TEXTS)

    def _check_applied(self, node: nodes.Filter, arguments: Sequence[nodes.Expr]) -> None:
        """Check the filter or test that ``map('trim')`` or ``select('string')`` applies: it must be known, too."""
        if node.name not in _LISTS or [keyword.key for keyword in node.kwargs] == ["attribute"]:
            return
        place, known = _LISTS[node.name], _TEXTS | _NUMBERS if node.name == "map" else _TESTS
        applied = arguments[place : place + 1] if node.name != "map" else arguments
        for one in applied:
            if not isinstance(one, nodes.Const) or one.value not in known:
                raise CostUnknown(f"{node.name} applies an unsupported filter or test")

    def _call(self, node: nodes.Call) -> Value:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise CostUnknown("a call has computed arguments")
        given = list(map(self.value, node.args))
        keywords = {keyword.key: self.value(keyword.value) for keyword in node.kwargs}
        if isinstance(node.node, nodes.Getattr):
            return self._grown(self._method(node.node, node.args, given))
        name = node.node.name if isinstance(node.node, nodes.Name) else ""
        if name in self.macros:
            return self._grown(self.macro_call(self.macros[name], given, keywords))
        if name in self.names:
            raise CostUnknown("a value is called")
        return self._function(name, node.args)

    def _method(self, method: nodes.Getattr, arguments: Sequence[nodes.Expr], given: Sequence[Value]) -> Value:
        value = replace(self.value(method.node), is_rows=False)
        if method.attr == "replace":
            return self._replaced(value, arguments)
        if method.attr in _FREE_METHODS:
            return either([value, *given])
        if method.attr not in _CHEAP_METHODS:
            raise CostUnknown(f"the method {method.attr} is not supported")
        return self._cheap(value)

    def _replaced(self, value: Value, arguments: Sequence[nodes.Expr]) -> Value:
        return replace(self._cheap(value), weight=value.weight * growth_by_replacing(arguments), is_text=True)

    def _function(self, name: str, arguments: Sequence[nodes.Expr]) -> Value:
        if name == "raise_exception" or (name == "namespace" and not arguments):
            return Value()
        if name == "strftime_now" and len(arguments) == 1 and is_plain_pattern(arguments[0]):
            return of_text(" " * _TIME_CHARS)
        is_known = all(self.names[one].is_rows for one in ROWS & self.names.keys())
        if name == "range" and not self.loops and is_known and all(map(is_short, arguments)):
            return replace(of_input(), is_rows=True)
        raise CostUnknown(f"the function {name} is not supported")

    # --- use of a value in a loop -------------------------------------------------------------------------------------

    def _is_own(self, value: Value) -> bool:
        return value.is_number or value.level == math.inf or (value.level >= len(self.loops) and not value.is_repeated)

    def _cheap(self, value: Value) -> Value:
        """Return a value that is copied or scanned. Raises CostUnknown in a loop that does not own it."""
        if self.is_written or self._is_own(value) or self.loops == [True]:
            return value
        raise CostUnknown("a loop copies a value from outside the loop")

    def _heavy(self, value: Value) -> Value:
        if self.is_written or self._is_own(value):
            return value
        raise CostUnknown("a loop writes out a value from outside the loop")
