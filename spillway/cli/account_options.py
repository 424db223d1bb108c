"""The options of keys and teams, in one table each, and the parsers of their values."""

import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Final, NamedTuple

import typer

from db.accounts.principal import SCOPES, Policy
from db.money import NANO_USD, nano_usd
from spillway.cli.context import Options
from spillway.cli.output import zoned_time

NONE: Final = "none"  # removes a limit
NEVER: Final = "never"  # no expiry; no hosted API
_BUDGET: Final = re.compile(r"\$?\s*(\d{1,10}(?:\.\d{1,9})?)\s*(?:USD)?\s*[/ ]\s*(day|week|month|total)", re.IGNORECASE)
_DURATION: Final = re.compile(r"(\d{1,6})\s*([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class AccountOption(NamedTuple):
    """An option that sets fields of a key or a team."""

    annotation: Any  # for Typer
    read: Callable[[Any], dict[str, Any]]  # returns fields by column name. Raises ValueError


def expiry_unix_ms(text: str) -> int | None:
    """Parse an expiry: ``90d`` (h, m, s) from now, ``2027-01-31`` in local time, ``never``. Raises ValueError.

    A moment may name its zone: ``2027-01-31T18:00+01:00``, ``2027-01-31T18:00Z``.
    """
    if text == NEVER:
        return None
    after = _DURATION.fullmatch(text)
    if after is not None:
        return int((time.time() + int(after[1]) * _UNIT_S[after[2]]) * 1000)
    try:
        moment = datetime.fromisoformat(text)
        unix_ms = int(moment.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"must be such as 90d, 12h, 2027-01-31 (00:00 {datetime.now().astimezone():%Z}), 2027-01-31T18:00Z or never"
        ) from error
    if unix_ms <= time.time() * 1000:
        raise ValueError(f"{zoned_time(unix_ms)} is not in the future")
    return unix_ms


def duration_s(text: str, option: str) -> int:
    """Parse ``24h``, ``30m``, ``7d`` or ``0`` into seconds. Raises BadParameter."""
    if text == "0":
        return 0
    found = _DURATION.fullmatch(text)
    if found is None:
        raise typer.BadParameter("must be a duration such as 24h, 30m, 7d or 0", param_hint=option)
    return int(found[1]) * _UNIT_S[found[2]]


def limits_text(policy: Policy) -> str:
    """Summarize a policy's limits."""
    words = [
        f"{value:,} {unit}"
        for value, unit in (
            (policy.requests_per_minute, "rpm"),
            (policy.tokens_per_minute, "tpm"),
            (policy.max_concurrent, "concurrent"),
        )
        if value is not None
    ]
    if policy.budget_nano_usd is not None:
        words.append(f"{Decimal(policy.budget_nano_usd) / NANO_USD:f} USD/{policy.budget_period}")
    if policy.weight is not None:
        words.append(f"weight {policy.weight:g}")
    if policy.priority == "batch":
        words.append("batch only")
    if policy.trusted_only:
        words.append("trusted pools only")
    if policy.allow_hosted is not None:
        words.append(f"hosted: {' '.join(policy.allow_hosted) or NEVER}")
    return ", ".join(words)


def _number(kind: type[int] | type[float]) -> Callable[[str], float | None]:
    def read(text: str) -> float | None:
        try:
            return None if text == NONE else kind(text.replace("_", ""))
        except ValueError as error:
            raise ValueError(f"{text!r} is neither a number nor `none`") from error

    return read


def _hosted(words: list[str]) -> tuple[str, ...] | None:
    if words == [NONE]:
        return None
    return () if words == [NEVER] else tuple(words)


def _budget(text: str) -> dict[str, Any]:
    if text == NONE:
        return {"budget_nano_usd": None, "budget_period": None}
    found = _BUDGET.fullmatch(text.strip())
    if found is None:
        raise ValueError('must be such as "50 USD/month", "2.50 USD/day" or "1000 USD/total"')
    return {"budget_nano_usd": nano_usd(Decimal(found[1])), "budget_period": found[2].lower()}


def _option(
    field: str,
    kind: Any,  # noqa: ANN401  # the type that Typer parses
    read: Callable[[Any], Any],
    *flags: str,
    **attributes: Any,  # noqa: ANN401  # passed to typer.Option
) -> AccountOption:
    """Return an option of one field. Typer parses the text as ``kind``; ``read`` converts that to the field's value."""
    return AccountOption(Annotated[kind | None, typer.Option(*flags, **attributes)], lambda given: {field: read(given)})


# Fields without an option are unchanged. A team's limits and budget apply to all its keys together. A key's limits
# apply in addition to its team's.
POLICY_OPTIONS: Final = {
    "rpm": _option(
        "requests_per_minute", str, _number(int), metavar="N", help="Requests per minute. `none` removes the limit."
    ),
    "tpm": _option(
        "tokens_per_minute",
        str,
        _number(int),
        metavar="N",
        help="Prompt and completion tokens per minute. `none` removes the limit.",
    ),
    "concurrent": _option(
        "max_concurrent", str, _number(int), metavar="N", help="Concurrent requests. `none` removes the limit."
    ),
    "budget": AccountOption(
        Annotated[
            str | None,
            typer.Option(
                metavar="MONEY",
                help='Budget per day, week or month (UTC) or in total, such as "50 USD/month". `none` removes it.',
            ),
        ],
        _budget,
    ),
    "weight": _option(
        "weight", str, _number(float), metavar="W", help="Share of the workers, relative to others. `none`: 1."
    ),
    "batch_only": _option(
        "priority",
        bool,
        {True: "batch", False: "interactive"}.get,
        "--batch-only/--interactive",
        help="Serve all requests as batch work, with the capacity that interactive requests leave.",
    ),
    "log_payload": _option("log_payload", bool, bool, help="Store prompts and answers. Default: no."),
    "train_ok": _option("train_ok", bool, bool, help="Allow training sets from stored prompts. Default: no."),
    "redact": _option("redact", bool, bool, help="Redact personal data in stored prompts. Default: yes."),
    "retention_days": _option(
        "retention_days",
        str,
        _number(int),
        metavar="N",
        help="Days for which prompts and answers are stored. `none`: the default.",
    ),
    "allow_hosted": _option(
        "allow_hosted",
        list[str],
        _hosted,
        metavar="PROVIDER[/MODEL]",
        help="Hosted API to which prompts may be sent, such as openai or openai/gpt-*. Repeatable. "
        "`never`: no hosted API. `none`: use the team's setting, or else the configuration's.",
    ),
    "trusted_only": _option(
        "trusted_only",
        bool,
        bool,
        "--trusted-only/--any-pool",
        help="Use only pools with `trusted = true`. A team's setting applies to all its keys.",
    ),
}
TEAM_OPTIONS: Final = {
    "organisation": _option("organisation", str, str, "--organisation", "-o", help="Name or id of its organization."),
    **POLICY_OPTIONS,
}
KEY_OPTIONS: Final = {
    "team": _option("team", str, str, "--team", "-t", help="Name or id of its team. `default`: no team."),
    "scope": _option("scopes", list[str], tuple, help=f"A scope: {', '.join(SCOPES)}. Repeatable."),
    "model": _option(
        "models", list[str], list, "--model", "-m", help="A model that the key may use. Repeatable. `all`: every model."
    ),
    "expires": _option(
        "expires_unix_ms",
        str,
        expiry_unix_ms,
        help="Expiry: 90d, 12h, 2027-01-31 (00:00 in this machine's time zone), 2027-01-31T18:00Z or never.",
    ),
    **POLICY_OPTIONS,
}
NAME_OPTION: Final = {"name": _option("name", str, str, help="A new name.")}


def changes_of(table: Mapping[str, AccountOption], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the options set. Raises BadParameter."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            changes |= table[name].read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from error
    return changes


def _options(table: Mapping[str, AccountOption]) -> Options:
    annotations = {name: option.annotation for name, option in table.items()}
    return Options(annotations, lambda **given: changes_of(table, given))


# The fields that a command's options set.
NewTeam = Annotated[dict[str, Any], _options(TEAM_OPTIONS)]
TeamChanges = Annotated[dict[str, Any], _options(NAME_OPTION | TEAM_OPTIONS)]
NewKey = Annotated[dict[str, Any], _options(KEY_OPTIONS)]
KeyChanges = Annotated[dict[str, Any], _options(NAME_OPTION | KEY_OPTIONS)]
