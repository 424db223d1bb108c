"""Options for the limits and consents of keys and teams, and parsing of limits, money and times."""

import os
import pwd
import re
import time
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Final

import typer

from db.accounts.principal import Policy
from db.money import NANO_USD, nano_usd

NONE: Final = "none"  # removes a limit
_BUDGET: Final = re.compile(r"\$?\s*(\d{1,10}(?:\.\d{1,9})?)\s*(?:USD)?\s*[/ ]\s*(day|week|month|total)", re.IGNORECASE)
_DURATION: Final = re.compile(r"(\d{1,6})\s*([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

RpmOption = Annotated[
    str | None, typer.Option("--rpm", metavar="N", help="Requests per minute. `none`: no limit of its own.")
]
TpmOption = Annotated[
    str | None, typer.Option("--tpm", metavar="N", help="Tokens per minute, prompt and completion. Or `none`.")
]
ConcurrentOption = Annotated[
    str | None, typer.Option("--concurrent", metavar="N", help="Concurrent requests. Or `none`.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="MONEY", help='Such as "50 USD/month": per day, week, month (UTC) or total.'),
]
WeightOption = Annotated[
    str | None,
    typer.Option("--weight", metavar="W", help="Share of the workers relative to others. Or `none`: 1."),
]
BatchOption = Annotated[
    bool | None,
    typer.Option("--batch-only/--interactive", help="Serve all its requests with capacity left by interactive ones."),
]
LogPayloadOption = Annotated[
    bool | None, typer.Option("--log-payload/--no-log-payload", help="Store prompts and answers. Default: no.")
]
TrainOption = Annotated[
    bool | None, typer.Option("--train-ok/--no-train-ok", help="Allow training sets from them. Default: no.")
]
RedactOption = Annotated[
    bool | None, typer.Option("--redact/--no-redact", help="Redact personal data before they are stored. Default: yes.")
]
RetentionOption = Annotated[
    str | None, typer.Option("--retention-days", metavar="N", help="How long they are stored. Or `none`: the default.")
]

TrustedOption = Annotated[
    bool | None,
    typer.Option(
        "--trusted-only/--any-pool", help="Use pools with `trusted = true` alone. A team's holds for its keys."
    ),
]
HostedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-hosted",
        metavar="PROVIDER[/MODEL]",
        help="A hosted API that prompts may be sent to, such as openai or openai/gpt-*; repeatable. "
        "`never`: none. `none`: the team's setting, or else the configuration's.",
    ),
]
NEVER: Final = "never"


def policy_changes(
    *,
    rpm: str | None,
    tpm: str | None,
    concurrent: str | None,
    budget: str | None,
    weight: str | None,
    batch_only: bool | None,
    log_payload: bool | None,
    train_ok: bool | None,
    redact: bool | None,
    retention_days: str | None,
    allow_hosted: list[str] | None,
    trusted_only: bool | None,
) -> dict[str, Any]:
    """Return the fields of Policy that the options name. Raises BadParameter."""
    counts = {
        "requests_per_minute": ("--rpm", rpm),
        "tokens_per_minute": ("--tpm", tpm),
        "max_concurrent": ("--concurrent", concurrent),
        "retention_days": ("--retention-days", retention_days),
    }
    changes: dict[str, Any] = {
        field: _number(text, option, int) for field, (option, text) in counts.items() if text is not None
    }
    if weight is not None:
        changes["weight"] = _number(weight, "--weight", float)
    if budget is not None:
        changes.update(_budget(budget))
    if batch_only is not None:
        changes["priority"] = "batch" if batch_only else "interactive"
    if allow_hosted:
        changes["allow_hosted"] = _hosted_grant(allow_hosted)
    consents = {"log_payload": log_payload, "train_ok": train_ok, "redact": redact, "trusted_only": trusted_only}
    return changes | {field: consent for field, consent in consents.items() if consent is not None}


def _hosted_grant(words: list[str]) -> tuple[str, ...] | None:
    if words == [NONE]:
        return None
    return () if words == [NEVER] else tuple(words)


def expiry_unix_ms(text: str) -> int | None:
    """Parse an expiry: ``90d`` (h, m, s) from now, ``2027-01-31`` in local time, ``never``. Raises BadParameter.

    A moment may name its zone: ``2027-01-31T18:00+01:00``, ``2027-01-31T18:00Z``.
    """
    if text == "never":
        return None
    after = _DURATION.fullmatch(text)
    if after is not None:
        return int((time.time() + int(after[1]) * _UNIT_S[after[2]]) * 1000)
    try:
        moment = datetime.fromisoformat(text)
        unix_ms = int(moment.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"such as 90d, 12h, 2027-01-31 (00:00 {datetime.now().astimezone():%Z}), 2027-01-31T18:00Z or never",
            param_hint="--expires",
        ) from error
    if unix_ms <= time.time() * 1000:
        raise typer.BadParameter(f"{zoned_time(unix_ms)} is not in the future", param_hint="--expires")
    return unix_ms


def duration_s(text: str, option: str) -> int:
    """Parse ``24h``, ``30m``, ``7d`` or ``0`` into seconds. Raises BadParameter."""
    if text == "0":
        return 0
    found = _DURATION.fullmatch(text)
    if found is None:
        raise typer.BadParameter("such as 24h, 30m, 7d or 0", param_hint=option)
    return int(found[1]) * _UNIT_S[found[2]]


def limits_text(policy: Policy) -> str:
    """Summarise a policy's limits."""
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


def local_time(unix_ms: int | None) -> str:
    """Format a moment in this machine's time zone; empty if there is none."""
    return "" if unix_ms is None else f"{datetime.fromtimestamp(unix_ms / 1000).astimezone():%Y-%m-%d %H:%M}"


def zoned_time(unix_ms: int | None) -> str:
    """Format a moment with the name of this machine's time zone; empty if there is none."""
    return "" if unix_ms is None else f"{local_time(unix_ms)} {datetime.fromtimestamp(unix_ms / 1000).astimezone():%Z}"


def this_actor() -> str:
    """Return the user of this command as an actor of the audit log."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:{os.getuid()}"


def _number(text: str, option: str, kind: type[int] | type[float]) -> float | None:
    if text == NONE:
        return None
    try:
        return kind(text.replace("_", ""))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither a number nor `none`", param_hint=option) from error


def _budget(text: str) -> dict[str, Any]:
    if text == NONE:
        return {"budget_nano_usd": None, "budget_period": None}
    found = _BUDGET.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter('such as "50 USD/month", "2.50 USD/day", "1000 USD/total"', param_hint="--budget")
    return {"budget_nano_usd": nano_usd(Decimal(found[1])), "budget_period": found[2].lower()}
