"""Reads message texts out of the source: which constructor or function is called with which text.

A text that is put together is a template: what is known only at run time is a placeholder, `{name}`. Names are followed
to assignments, constants of modules, return values of functions, and arguments of callers.
"""

import ast
import gc
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ROOTS: Final = (
    "gateway", "console", "ledger", "fleet", "pool_worker", "engine", "protocol", "db", "migrations", "models",
    "spillway",
)  # fmt: skip
MAX_DEPTH: Final = 6  # names followed, one from another
MAX_TEMPLATES: Final = 12  # of one expression; more become placeholders
_HOLE: Final = re.compile(r"\{[^{}]*\}")
_TRANSPARENT: Final = {"str", "repr", "len", "sorted", "join", "ceil", "sum", "round"}  # calls named by their argument
_FORMAT: Final = re.compile(r"%[-.\d]*[a-z]")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Module:
    """One source file."""

    path: str  # from the repository's root
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, list[Function]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)  # name → dotted module and name
    outer: dict[Function, Function | None] = field(default_factory=dict)  # the function around each
    calls: dict[str, list["Site"]] = field(default_factory=dict)  # by the called name, without its prefix
    classes: list[ast.ClassDef] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)  # names of classes that are raised without a call

    @property
    def root(self) -> str:
        """The top folder."""
        return self.path.partition("/")[0]

    @property
    def dotted(self) -> str:
        """The name that it is imported by."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Site:
    """A call, and where it is."""

    module: Module
    function: Function | None  # that it is in
    call: ast.Call


@cache
def modules() -> tuple[Module, ...]:
    """Return all product modules."""
    paths = sorted(path for root in ROOTS for path in (ROOT / root).rglob("*.py"))
    was_enabled = gc.isenabled()
    gc.disable()  # nothing here becomes garbage, and looking for it takes most of the time
    try:
        return tuple(read_module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)
    finally:
        if was_enabled:
            gc.enable()


def read_module(path: str, source: str) -> Module:
    """Read one source file."""
    module = Module(path, ast.parse(source))
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            module.constants[node.target.id] = node.value
    _visit(module, module.tree, None)
    return module


def _visit(module: Module, node: ast.AST, function: Function | None) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            module.functions.setdefault(child.name, []).append(child)
            module.outer[child] = function
        elif isinstance(child, ast.ImportFrom):
            module.imported |= {alias.asname or alias.name: f"{child.module}.{alias.name}" for alias in child.names}
        elif isinstance(child, ast.Call):
            module.calls.setdefault(called_name(child), []).append(Site(module, function, child))
        elif isinstance(child, ast.ClassDef):
            module.classes.append(child)
        elif isinstance(child, ast.Raise) and isinstance(child.exc, ast.Name):
            module.raised.append(child.exc.id)
        _visit(module, child, child if isinstance(child, Function) else function)


def called_name(call: ast.Call) -> str:
    """Return the called name without what is before its last dot; empty for other expressions."""
    func = call.func
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""


def sites(*names: str) -> Iterator[Site]:
    """Iterate over all calls of these names."""
    for module in modules():
        for name in names:
            yield from module.calls.get(name, ())


def argument(site: Site, position: int | None, name: str) -> ast.expr | None:
    """Return an argument of a call; None if it is left out. ``position``: None if it has only a name."""
    for keyword in site.call.keywords:
        if keyword.arg == name:
            return keyword.value
    args = site.call.args
    if position is None:
        return None
    return args[position] if position < len(args) and not isinstance(args[position], ast.Starred) else None


def texts(site: Site, node: ast.expr, caller: Site | None = None) -> list[str]:
    """Return the templates of an argument of a call.

    ``caller``: the one call of the function around ``site`` to look at; None: all of them.
    """
    found = _texts(node, Scope(site.module, site.function, caller), MAX_DEPTH)
    return list(dict.fromkeys(" ".join(text.split()) for text in found))


def pattern_of(templates: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the texts that templates make. Runs of white space count as one space."""
    alternatives = (".*".join(re.escape(piece) for piece in _HOLE.split(text)) for text in templates)
    return re.compile("|".join(f"(?:{one})" for one in alternatives), re.DOTALL)


def distinct(templates: Iterable[str]) -> list[str]:
    """Return templates sorted, of those that differ only in the names of placeholders one."""
    return sorted({_HOLE.sub("{}", text): text for text in sorted(templates, reverse=True)}.values())


def is_open(template: str) -> bool:
    """Report whether nothing of a text is known."""
    return not _HOLE.sub("", template).strip(" .:,;'`")


# --- expressions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """Where an expression is."""

    module: Module
    function: Function | None
    caller: Site | None = None  # the only call of the function that counts; None: all


@cache
def _texts(node: ast.expr, scope: Scope, depth: int) -> Sequence[str]:
    match node:
        case ast.Constant(value=str() | int() | float()):
            return [str(node.value)]
        case ast.Attribute(value=ast.Name(id="ErrorCode")):
            return [ast.unparse(node)]
        case ast.JoinedStr():
            return _product([_texts(part, scope, depth) for part in node.values])
        case ast.BinOp(op=ast.Add()):
            return _product([_texts(side, scope, depth) for side in (node.left, node.right)])
        case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str() as text)):
            return [_FORMAT.sub("{…}", text)]
        case ast.IfExp() | ast.BoolOp(op=ast.Or()):
            alternatives = node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse)
            if any(isinstance(one, ast.Constant) and isinstance(one.value, int) for one in alternatives):
                return [_hole(node)]
            return _limited([text for one in alternatives for text in _texts(one, scope, depth)], node)
        case ast.Await():
            return _texts(node.value, scope, depth)
        case _:
            return _followed(node, scope, depth - 1) if depth else [_hole(node)]


def _followed(node: ast.expr, scope: Scope, depth: int) -> Sequence[str]:
    """Return the texts of an expression that leads elsewhere."""
    match node:
        case ast.FormattedValue(format_spec=None, value=value) if not _is_anything(value, scope):
            return _texts(value, scope, depth)
        case ast.FormattedValue():
            return [_hole(node.value)]
        case ast.Name():
            return _limited(_texts_of_name(node, scope, depth), node)
        case ast.Call():
            return _limited(_texts_of_call(node, scope.module, depth), node)
        case _:
            return [_hole(node)]


def _is_anything(node: ast.expr, scope: Scope) -> bool:
    """Report whether a value in a text is a number, or one that callers in any file may pass."""
    if isinstance(node, ast.Name) and scope.function is not None and not scope.function.name.startswith("_"):
        values, _ = _assigned(scope.function.body, node, node.id)
        return not values and node.id in _parameters(scope.function)
    return isinstance(node, ast.BinOp)


def _parameters(function: Function) -> list[str]:
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _texts_of_name(node: ast.Name, scope: Scope, depth: int) -> list[str]:
    module, function = scope.module, scope.function
    if function is not None:
        values, _ = _assigned(function.body, node, node.id)
        if values:
            return [text for value in values for text in _texts(value, scope, depth)]
        if node.id in _parameters(function):
            return _texts_of_parameter(node.id, scope, depth)
        outer = module.outer[function]
        if outer is not None:
            return _texts_of_name(node, Scope(module, outer), depth)
    if node.id in module.constants:
        value = module.constants[node.id]
        is_text = isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp)
        return list(_texts(value, Scope(module, None), depth)) if is_text else []
    source, _, name = module.imported.get(node.id, "").rpartition(".")
    other = _by_name().get(source)
    if other is not None and other is not module and name in other.constants:
        return _texts_of_name(ast.Name(name), Scope(other, None), depth)
    return []


def _texts_of_parameter(name: str, scope: Scope, depth: int) -> list[str]:
    """Return what callers pass: those in the same file, and in files that import something of it."""
    function, found = scope.function, list[str]()
    if function is None or function.name == "__init__":
        return []
    parameters = _parameters(function)
    position, default = parameters.index(name) - (parameters[0] in {"self", "cls"}), _default(function, name)
    callers = _callers(scope.module, function.name) if scope.caller is None else [scope.caller]
    for site in callers:
        value = argument(site, position, name)
        if value is not None and site.function is not function:
            found += _texts(value, Scope(site.module, site.function), depth)
        elif value is None and default is not None:
            found += _texts(default, Scope(scope.module, None), depth)
    return found


def _default(function: Function, name: str) -> ast.expr | None:
    args = function.args
    positional = [one.arg for one in (*args.posonlyargs, *args.args)]
    defaults = dict(zip(reversed(positional), reversed(args.defaults), strict=False))
    return (defaults | dict(zip((one.arg for one in args.kwonlyargs), args.kw_defaults, strict=True))).get(name)


def _callers(module: Module, name: str) -> list[Site]:
    others = [] if name.startswith("_") else _importers().get(module.dotted, [])
    return [site for one in (module, *others) for site in one.calls.get(name, ())]


@cache
def _importers() -> dict[str, list[Module]]:
    """Return the modules that import something of each."""
    found: dict[str, list[Module]] = {}
    for module in modules():
        for source in {name.rpartition(".")[0] for name in module.imported.values()}:
            found.setdefault(source, []).append(module)
    return found


def _texts_of_call(node: ast.Call, module: Module, depth: int) -> list[str]:
    name = called_name(node)
    if isinstance(node.func, ast.Name):
        source, _, imported = module.imported.get(name, "").rpartition(".")
        module, name = _by_name().get(source, module), imported or name
    found: list[str] = []
    for function in module.functions.get(name, ()):
        if ast.unparse(function.returns or ast.Constant(None)) in {"str", "str | None"}:
            scope = Scope(module, function)
            found += [text for value in _returned(function) for text in _texts(value, scope, depth)]
    return [text for text in found if text != "None"]


def _assigned(block: Sequence[ast.stmt], use: ast.expr, name: str) -> tuple[list[ast.expr], bool]:
    """Return what a name may have been assigned where it is used, and whether it surely was.

    ``block``: statements before the use or around it.
    """
    found: list[ast.expr] = []
    for statement in reversed([one for one in block if _starts_before(one, use)]):
        values = _values(statement, name)
        if values:
            return [*found, *values], True
        is_around = _is_inside(use, statement)
        results = [_assigned(inner, use, name) for inner in _blocks(statement, use if is_around else None)]
        found += [value for values, _ in results for value in values]
        is_whole = is_around or (isinstance(statement, ast.If) and len(results) == 2) or isinstance(statement, ast.With)
        if results and is_whole and all(is_sure for _, is_sure in results):
            return found, True
        if is_around and isinstance(statement, ast.For | ast.AsyncFor) and name in _names(statement.target):
            return found, True  # it differs with each round
    return found, False


def _blocks(statement: ast.stmt, use: ast.expr | None) -> list[list[ast.stmt]]:
    """Return the blocks inside a statement; with ``use``, only the one around it."""
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [one.body for name in ("handlers", "cases") for one in getattr(statement, name, [])]
    if isinstance(statement, Function | ast.ClassDef):
        return []
    return [block for block in blocks if block and (use is None or any(_is_inside(use, one) for one in block))]


def _values(statement: ast.stmt, name: str) -> list[ast.expr]:
    for node in (statement, *(one.value for one in [statement] if isinstance(one, ast.Expr))):
        if isinstance(node, ast.AnnAssign | ast.NamedExpr):
            if isinstance(node.target, ast.Name) and node.target.id == name and node.value is not None:
                return [node.value]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    return [node.value]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, value in zip(target.elts, node.value.elts, strict=True):
                        if isinstance(one, ast.Name) and one.id == name:
                            return [value]
    return []


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _starts_before(statement: ast.stmt, use: ast.expr) -> bool:
    return (statement.lineno, statement.col_offset) <= (use.lineno, use.col_offset) and not (
        isinstance(statement, ast.Assign | ast.AnnAssign) and _is_inside(use, statement)
    )


def _is_inside(use: ast.expr, statement: ast.stmt) -> bool:
    start, end = (statement.lineno, statement.col_offset), (statement.end_lineno or 0, statement.end_col_offset or 0)
    return start <= (use.lineno, use.col_offset) < end


def _returned(function: Function) -> Iterator[ast.expr]:
    return (node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None)


@cache
def _by_name() -> dict[str, Module]:
    return {one.dotted: one for one in modules()}


def _product(parts: list[Sequence[str]]) -> list[str]:
    while len(parts) > 1 and _count(parts) > MAX_TEMPLATES:
        widest = max(range(len(parts)), key=lambda number: len(parts[number]))
        parts[widest] = ["{…}"]
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _count(parts: list[Sequence[str]]) -> int:
    count = 1
    for part in parts:
        count *= len(part)
    return count


def _limited(found: list[str], node: ast.expr) -> list[str]:
    found = list(dict.fromkeys(_hole(node) if _HOLE.fullmatch(text) else text for text in found if text != "None"))
    return found if 0 < len(found) <= MAX_TEMPLATES else [_hole(node)]


def _hole(node: ast.expr) -> str:
    """Return a placeholder with a name that says what it is for."""
    match node:
        case ast.Name():
            name = node.id
        case ast.Attribute():
            name = node.attr
        case ast.Call(args=[inner, *_]) if called_name(node) in _TRANSPARENT:
            return _hole(inner)
        case ast.Subscript():
            return _hole(node.value)
        case ast.BinOp():
            return _hole(node.left)
        case ast.IfExp():
            return _hole(node.orelse if isinstance(node.body, ast.Constant) else node.body)
        case _:
            name = ""
    return "{%s}" % (name.strip("_").lower() or "…")
