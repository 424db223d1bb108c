"""Proof that a chat template terminates quickly for every conversation.

A template is a program from a model folder. Nearly all only iterate over messages, their calls and tools, and join
texts; for those this walk over their syntax tree finds bounds, and they run inside the gateway. A template with any
construct unknown here is not proven, and runs in another process (``renderer``). Two things are bounded, in units of
the conversation:

- *Time*: a loop iterates over a part of the enclosing loop's current item (message, call, …), so that all loops
  together visit the conversation once; only the tools may be visited for each message. Any other value in a loop (a
  system prompt, all tools) costs no more than a copy for each message, or is output directly, within the output's own
  limit.
- *Size*: every value has a ``weight``, its maximum size in multiples of the conversation. In a loop a namespace may
  only grow by parts of the loop's current item.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final

from jinja2 import nodes

from gateway.tokenizing.template_expressions import Expressions
from gateway.tokenizing.template_values import (
    NUMBER,
    CostUnknown,
    Value,
    as_text,
    either,
    is_call_of,
    joined,
    names_of,
    of_input,
    size_of_constant,
)

MAX_MACRO_DEPTH: Final = 6


def unproven_reason(template: nodes.Template) -> str | None:
    """Return the reason why a parsed template is not proven; None if it is."""
    try:
        _Proof().body(template.body)
    except CostUnknown as reason:
        return str(reason)
    except RecursionError:
        return "it is nested too deeply"
    return None


class _Proof(Expressions):
    """The walk over the statements, in the template's order of execution."""

    def __init__(self) -> None:
        super().__init__()
        self._captures: list[tuple[int, list[Value]]] = []  # output captured in variables: loop depth, values
        self._calls: list[str] = []  # enclosing macros
        self._is_over_tools = False  # inside a loop over the tools for each message
        self._statements: dict[type[nodes.Node], Callable[[Any], None]] = {
            nodes.Output: self._output,
            nodes.If: self._if,
            nodes.For: self._loop,
            nodes.Assign: self._assignment,
            nodes.AssignBlock: self._assigned_block,
            nodes.Macro: self._macro,
            nodes.Scope: lambda node: self._scoped(node.body),
            nodes.Break: lambda _: None,
            nodes.Continue: lambda _: None,
        }

    def body(self, statements: Sequence[nodes.Node]) -> None:
        """Walk over statements. Raises CostUnknown."""
        for node in statements:
            self.step()
            statement = self._statements.get(type(node))
            if statement is None:
                raise CostUnknown(f"{type(node).__name__} is not supported")
            statement(node)

    def _scoped(self, body: Sequence[nodes.Node]) -> None:
        before = dict(self.names)
        self.body(body)
        self.names = before

    def _if(self, node: nodes.If) -> None:
        self.value(node.test)
        before, ends = dict(self.names), []
        for branch in [node.body, *[one.body for one in node.elif_], node.else_]:
            self.names = dict(before)
            self.body(branch)
            ends.append(self.names)
        for one in node.elif_:
            self.value(one.test)
        self.names = {}
        for name in {name for end in ends for name in end}:
            values = [end.get(name, of_input()) for end in ends]
            self.names[name] = values[0] if all(value is values[0] for value in values) else either(values)

    def _macro(self, node: nodes.Macro) -> None:
        if node.name in self.names or node.name in self.macros:
            raise CostUnknown("a name has two meanings")
        self.macros[node.name] = node

    # --- output -------------------------------------------------------------------------------------------------------

    def _output(self, node: nodes.Output) -> None:
        for child in node.nodes:
            self.is_written = not self._captures
            value = self.value(child)
            self.is_written = False
            if self._captures:
                self._capture(child, value)

    def _capture(self, node: nodes.Expr, value: Value) -> None:
        depth, written = self._captures[-1]
        if len(self.loops) > depth:
            if not self._is_own(value) or value.gathered:
                raise CostUnknown("a loop accumulates a value from outside the loop")
            if value.level == inf:  # the template's own text, at most once per character of the conversation
                value = replace(value, weight=max(1.0, size_of_text(node)))
        written.append(as_text(value))

    def _captured(self, body: Sequence[nodes.Node]) -> Value:
        written: list[Value] = []
        self._captures.append((len(self.loops), written))
        was_written, self.is_written = self.is_written, False
        self._scoped(body)
        self.is_written = was_written
        self._captures.pop()
        return self.limited(replace(joined(written), is_number=False, is_text=True))

    def macro_call(self, macro: nodes.Macro, given: Sequence[Value], keywords: dict[str, Value]) -> Value:
        """Return the value that a macro writes. Raises CostUnknown."""
        if macro.name in self._calls or len(self._calls) >= MAX_MACRO_DEPTH:
            raise CostUnknown("a macro calls itself")
        names = [argument.name for argument in macro.args]
        if len(given) > len(names) or not keywords.keys() <= set(names):
            raise CostUnknown("a macro is called with arguments that it does not declare")
        before = dict(self.names)
        # A macro does not see its caller's variables: these names mean others there, perhaps of the conversation.
        self.names = {name: replace(value, level=0.0, weight=max(1.0, value.weight)) for name, value in before.items()}
        defaults = dict(zip(names[len(names) - len(macro.defaults) :], macro.defaults, strict=True))
        arguments = {name: self.value(defaults[name]) if name in defaults else Value() for name in names}
        self.names |= arguments | dict(zip(names, given, strict=False)) | keywords
        self._calls.append(macro.name)
        value = self._captured(macro.body)
        self._calls.pop()
        self.names = before
        return value

    # --- loops and names ----------------------------------------------------------------------------------------------

    def _loop(self, node: nodes.For) -> None:
        over, depth = self.value(node.iter), len(self.loops)
        is_product = depth > 0 and not self._goes_down(over)
        if node.recursive:
            raise CostUnknown("a loop calls itself")
        if depth > 0 and over.level == inf:
            raise CostUnknown("a nested loop iterates over values of the template")
        if is_product and (self._is_over_tools or not over.of_tools or not all(self.loops)):
            raise CostUnknown("a nested loop iterates over the whole conversation")
        before, was_over_tools = dict(self.names), self._is_over_tools
        self._is_over_tools = was_over_tools or is_product
        self.loops.append(over.is_rows and not is_product)
        item = replace(over, level=depth + 1.0, is_rows=False, is_repeated=over.is_repeated or is_product)
        for _ in range(2):  # the second time with the values gathered in the first
            self.names = before | dict.fromkeys(names_of(node.target), item) | {"loop": NUMBER}
            if node.test is not None:
                self.value(node.test)
            self.body(node.body)
        self.loops.pop()
        self._is_over_tools = was_over_tools
        self.names = before
        self._scoped(node.else_)

    def _goes_down(self, over: Value) -> bool:
        """Report whether a loop iterates over a part of the enclosing loop's current item."""
        return over.level >= len(self.loops)

    def _assignment(self, node: nodes.Assign) -> None:
        value = self.value(node.node)
        if isinstance(node.target, nodes.Name) and is_call_of(node.node, "namespace"):
            self._new_space(node.target.name, node.node)
        else:
            self._assign(node.target, value)

    def _assigned_block(self, node: nodes.AssignBlock) -> None:
        if node.filter is not None:
            raise CostUnknown("a block is filtered")
        self._assign(node.target, self._captured(node.body))

    def _new_space(self, name: str, call: Any) -> None:  # noqa: ANN401  # a call, which Jinja types as an expression
        if name in self.names or name in self.macros or self.loops:
            raise CostUnknown("a name has two meanings")
        self.spaces.add(name)
        for keyword in call.kwargs:
            self._gather(f"{name}.{keyword.key}", self.value(keyword.value))

    def _assign(self, target: nodes.Node, value: Value) -> None:
        if isinstance(target, nodes.NSRef):
            self._gather(f"{target.name}.{target.attr}", value)
            return
        for name in names_of(target):
            if name in self.spaces or name in self.macros or name == "loop":
                raise CostUnknown("a name has two meanings")
            self.names[name] = value

    def _gather(self, name: str, value: Value) -> None:
        if self.loops and (value.is_grown or value.gathered not in {(), (name,)}):
            raise CostUnknown("a loop grows a namespace from itself")
        before = self.gathered.get(name, Value())
        kept = either([before, value])
        self.gathered[name] = self.limited(replace(kept, level=0.0, gathered=(), is_grown=False, is_number=False))


def size_of_text(node: nodes.Node) -> float:
    """Return the length of a literal text of the template. Raises CostUnknown for a computed one."""
    if isinstance(node, nodes.TemplateData):
        return float(len(node.data))
    return size_of_constant(node)
