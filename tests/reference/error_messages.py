"""The messages that each error code can have, as templates, from the calls that make errors."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Final

from gateway import app  # noqa: F401  # all kinds of refusals are defined once it is imported
from gateway.error_codes import MALFORMED_JSON
from gateway.errors import Refused, RequestFailed
from protocol.errors import ErrorCode
from tests.reference.source_texts import Site, argument, called_name, distinct, modules, sites, texts

# What the admin API makes of errors of accounts (console/admin/routes.py).
_ACCOUNTS: Final = {
    "NameTaken": "name_in_use",
    "ChangedMeanwhile": "changed_meanwhile",
    "NotAllowed": "role_not_allowed",
    "UnknownKey": "not_found",
    "AmbiguousKey": "not_found",
    "UnknownTeam": "not_found",
    "UnknownOrganisation": "not_found",
}
_LINES: Final = ("Wrong", "LineError", "LineFailure")  # of batches: (code, message)
_TRANSLATING: Final = {"principal_answer", "too_many"}  # functions whose callers, or sources, are looked at instead
_SERVING: Final = ("gateway", "console")


@cache
def messages_by_code() -> dict[str, list[str]]:
    """Return all templates, sorted, by code."""
    found: dict[str, set[str]] = {}
    for code, template in (*_refusals(), *_failures(), *_rejections(), *_lines(), *_fields(), *_accounts()):
        found.setdefault(code, set()).add(template)
    return {code: distinct(templates) for code, templates in found.items()}


def kinds(base: type[Refused] = Refused) -> Iterator[type[Refused]]:
    """Iterate over the kinds of refusals."""
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def _refusals() -> Iterator[tuple[str, str]]:
    by_name = {kind.__name__: kind for kind in kinds() if kind is not RequestFailed}
    for name, kind in by_name.items():
        usual = kind.code or MALFORMED_JSON
        for site in _in(_SERVING, sites(name)):
            if site.function is not None and site.function.name in _TRANSLATING:
                continue
            message, code = argument(site, 0, "message"), argument(site, None, "code")
            codes = [usual] if code is None else texts(site, code)
            default = [(kind.__doc__ or "").strip()]
            yield from _pairs(codes, default if message is None else texts(site, message))
    for site in _in(_SERVING, sites("too_many")):
        yield from _pairs(*(texts(site, one) for one in reversed(site.call.args)))
    for raised in (name for module in modules() for name in module.raised):
        if raised in by_name:
            yield by_name[raised].code or MALFORMED_JSON, (by_name[raised].__doc__ or "").strip()


def _failures() -> Iterator[tuple[str, str]]:
    """Iterate over calls that pass a code and then a message, as ``Failure(ErrorCode.QUEUE_FULL, "…")``."""
    for module in modules():
        for several in module.calls.values():
            for site in several:
                yield from _failure(site)


def _failure(site: Site) -> Iterator[tuple[str, str]]:
    args = site.call.args
    is_failure = called_name(site.call) == "Failure"
    for code, message in pairwise(args):
        if isinstance(code, ast.Attribute) and ast.unparse(code.value) == "ErrorCode" and _is_message(site, message):
            yield from _pairs(texts(site, code), texts(site, message))
        elif is_failure and site.function is not None:
            for caller in site.module.calls.get(site.function.name, ()):
                yield from _pairs(texts(site, code, caller), texts(site, message, caller))


def _is_message(site: Site, node: ast.expr) -> bool:
    """Return whether a function in the same file calls this argument a message."""
    position = site.call.args.index(node)
    for function in site.module.functions.get(called_name(site.call), ()):
        names = [one.arg for one in function.args.args if one.arg not in {"self", "cls"}]
        return position < len(names) and names[position] in {"message", "reason", "text"}
    return True


def _rejections() -> Iterator[tuple[str, str]]:
    """Iterate over what workers refuse."""
    for name, code in (("RequestRejected", "invalid_request"), ("GrammarTooComplex", "grammar_too_complex")):
        for site in _in(("engine", "pool_worker"), sites(name)):
            yield from _pairs([code], texts(site, site.call.args[1]))


def _lines() -> Iterator[tuple[str, str]]:
    for site in _in(_SERVING, sites(*_LINES)):
        yield from _pairs(*(texts(site, one) for one in site.call.args[:2]))


def _fields() -> Iterator[tuple[str, str]]:
    """Iterate over what pydantic validators raise."""
    for site in sites("ValueError", "BadItem"):
        if site.module.path.startswith(("gateway/api/", "gateway/request/")) and site.call.args:
            for text in texts(site, site.call.args[-1]):
                yield "invalid_value", f"Invalid value for '{{param}}': {text}"


def _accounts() -> Iterator[tuple[str, str]]:
    for name, code in _ACCOUNTS.items():
        for site in _in(("db", "console"), sites(name)):
            yield from _pairs([code], [text for one in site.call.args for text in texts(site, one)])
    for site in _in(("db", "console"), sites("InvalidField", "InvalidName")):
        if len(site.call.args) > 1:
            fields, problems = (texts(site, one) for one in site.call.args[:2])
            yield from _pairs(["invalid_value"], [f"{name}: {problem}" for name in fields for problem in problems])


def _in(roots: Iterable[str], found: Iterable[Site]) -> Iterator[Site]:
    return (site for site in found if site.module.root in roots)


def _pairs(codes: Iterable[str], messages: Iterable[str]) -> Iterator[tuple[str, str]]:
    found = list(messages)
    for text in codes:
        _, dot, name = text.partition("ErrorCode.")
        code = ErrorCode[name].value if dot else text
        if "{" not in code:
            yield from ((code, message) for message in found if message)
