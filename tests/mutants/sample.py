"""What can be changed in a module, and a sample of it that is the same for the same seed.

A mutant is known by its content (path, scope, operator, the changed statement), not by line numbers, and drawn by a
hash of that: code that moves, or is written beside it, leaves the sample as it is.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

Node = Any  # of parso's tree
# Of cosmic-ray's replacements those that tests can be expected to notice, one or two an operator: `==` to `is`, or the
# eleven others of `|`, say the same again or nothing.
REPLACED = {
    "ReplaceComparisonOperator": (
        *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
        *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    ),
    "ReplaceBinaryOperator": (
        *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
        *("LShift_RShift", "RShift_LShift", "BitAnd_BitOr"),
    ),
    "ReplaceUnaryOperator": ("Delete_Not", "Delete_USub"),
}
OPERATORS = (
    *(f"core/{operator}_{replaced}" for operator, all_replaced in REPLACED.items() for replaced in all_replaced),
    *("core/AddNot", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd"),
    *("core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "core/NumberReplacer"),
    *("core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak", "core/ZeroIterationForLoop"),
    *("core/ExceptionReplacer", "DropCall"),
)
LOGGERS = ("log", "logger", "logging", "warnings")
NOISE = ("annassign", "tfpdef", "decorator", "assert_stmt")
COMPOUND = (
    "if_stmt",
    "while_stmt",
    "for_stmt",
    "with_stmt",
    "try_stmt",
    "funcdef",
    "classdef",
    "match_stmt",
    "case_block",
)


class DropCall:
    """Leave out a statement that is a call, which cosmic-ray has no operator for."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Find calls whose result nothing uses."""
        if node.type == "atom_expr" and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        """Put ``pass`` there."""
        return Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    id: str
    package: str
    path: str
    line: int
    operator: str
    occurrence: int
    lines: tuple[int, int]  # of the changed statement, or its head: whoever executes one of them can see it
    in_function: bool  # else executed by imports

    def rank(self, seed: int) -> str:
        """Say where it stands among those that may be drawn."""
        return hashlib.sha256(f"{seed} {self.id}".encode()).hexdigest()

    def mutated(self, code: str) -> str | None:
        """Return its file's code with the change; nothing if that is no other Python."""
        mutated: str | None = mutate_code(code, _operator(self.operator), self.occurrence)
        try:
            return mutated if mutated and ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(code)) else None
        except SyntaxError:
            return None


def _operator(name: str) -> Any:
    return DropCall() if name == "DropCall" else get_operator(name)()


def mutants_of(root: Path, package: str, files: list[str]) -> Iterator[Mutant]:
    """Find what these files can be changed to."""
    for path in files:
        yield from _mutants(package, path, (root / path).read_text())


def sample(mutants: Iterable[Mutant], root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` of them, at most one a statement."""
    drawn: dict[tuple[str, tuple[int, int]], Mutant] = {}
    for mutant in sorted(mutants, key=lambda mutant: mutant.rank(seed)):
        if len(drawn) == count:
            break
        if (mutant.path, mutant.lines) not in drawn and mutant.mutated((root / mutant.path).read_text()):
            drawn[mutant.path, mutant.lines] = mutant
    return list(drawn.values())


def _mutants(package: str, path: str, code: str) -> Iterator[Mutant]:
    seen: Counter[str] = Counter()
    tree = get_ast(code)
    nodes = list(ast_nodes(tree))
    code_lines = [line.strip() for line in code.splitlines()]
    for name in OPERATORS:
        operator = _operator(name)
        places = [(node, start) for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (node, start) in enumerate(places):
            leaf = tree.get_leaf_for_position(start)
            if _is_noise(leaf, name):
                continue
            lines, in_function = _statement(leaf)
            statement = code_lines[lines[0] - 1 : lines[1]]
            if statement == ["if TYPE_CHECKING:"]:
                continue
            scope = ASTQuery(node).get_definition_name() or ""
            key = "\n".join([path, scope, name, *statement])
            seen[key] += 1
            identity = hashlib.sha256(f"{key}\n{seen[key]}".encode()).hexdigest()[:16]
            yield Mutant(identity, package, path, start[0], name, occurrence, lines, in_function)


def _is_noise(leaf: Node, operator: str) -> bool:
    """Say whether it is something that tests need not notice: types, logs, and constants by one more or less."""
    in_function, child = False, leaf
    while (parent := child.parent) is not None:
        if parent.type in NOISE or (parent.type == "funcdef" and child.start_pos < _body_of(parent).start_pos):
            return True
        if parent.type == "atom_expr" and parent.get_first_leaf().value in LOGGERS:
            return True
        in_function |= parent.type == "funcdef"
        child = parent
    return operator == "core/NumberReplacer" and not in_function


def _body_of(funcdef: Node) -> Node:
    return funcdef.children[-1]


def _statement(leaf: Node) -> tuple[tuple[int, int], bool]:
    """Return the first and last line of its statement (of a compound one: of the part before the colon)."""
    lines, child = None, leaf
    in_function = False
    while (parent := child.parent) is not None:
        if lines is None and child.type == "simple_stmt":
            lines = child.start_pos[0], child.end_pos[0] - 1
        elif lines is None and parent.type in COMPOUND:
            colon = next(
                leaf
                for leaf in parent.children
                if leaf.type == "operator" and leaf.value == ":" and leaf.start_pos >= child.end_pos
            )
            lines = child.start_pos[0], colon.start_pos[0]
        in_function |= parent.type == "funcdef" and child is _body_of(parent)
        child = parent
    assert lines is not None
    return lines, in_function
