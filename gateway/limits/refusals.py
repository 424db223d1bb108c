"""Error messages of limits, and the use of each rate for response headers."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from db.money import usd_text
from gateway.errors import InsufficientQuota, RateLimitExceeded, RateStatus, Refused
from gateway.limits.local import LocalAccount, Refusal
from protocol.gateways import RATES, Kind

_LIMIT_NAMES: Final = {
    Kind.REQUESTS: "requests per minute",
    Kind.TOKENS: "tokens per minute",
    Kind.CONCURRENT: "concurrent requests",
}


def rates_of(local_accounts: Iterable[LocalAccount]) -> Mapping[Kind, RateStatus]:
    """Return the use of each rate: the key's or the team's, whichever has less left."""
    rates = {}
    for kind in RATES:
        known = [
            status for local in local_accounts if (status := local.rate_status(kind, local.clock.now_s())) is not None
        ]
        if known:
            rates[kind] = min(known, key=lambda status: status.remaining)
    return rates


def refused_by(refusal: Refusal, limit_param: str | None) -> Refused:
    """Return the error for a refusal by a limit.

    ``limit_param``: the field that reduces the size of the request; None: there is none.
    """
    if refusal.kind is Kind.MONEY:
        return _budget_error(refusal, limit_param)
    name = _LIMIT_NAMES[refusal.kind]
    if refusal.is_too_large:
        return RateLimitExceeded(
            f"Request too large for the {refusal.whose}'s limit of {name}: limit {refusal.limit}, requested"
            f" {refusal.needed}{_smaller(limit_param)}",
            param=limit_param,
            is_final=True,
            limit=refusal.kind,
        )
    return RateLimitExceeded(
        f"Rate limit reached for the {refusal.whose}'s {name}: limit {refusal.limit}, used {refusal.used},"
        f" requested {refusal.needed}.",
        retry_after_s=math.ceil(refusal.retry_after_s or 1),
        limit=refusal.kind,
    )


def _smaller(limit_param: str | None) -> str:
    """Return the end of a message about a request's size, with what to do."""
    if limit_param is None:
        return ". Make it smaller."
    return f" (prompt and '{limit_param}', for each choice). Lower '{limit_param}' or shorten the prompt."


def _budget_error(refusal: Refusal, limit_param: str | None) -> Refused:
    amounts = (
        f"limit {usd_text(refusal.limit)} USD, used {usd_text(refusal.used)} USD, this request may cost up to"
        f" {usd_text(refusal.needed)} USD"
    )
    if refusal.is_too_large:
        return InsufficientQuota(
            f"Request too large for the {refusal.whose}'s whole budget: {amounts}{_smaller(limit_param)}",
            param=limit_param,
            limit=Kind.MONEY,
        )
    if refusal.retry_after_s is None and refusal.used < refusal.limit:
        return InsufficientQuota(
            f"Not enough of the {refusal.whose}'s budget is left: {amounts}{_smaller(limit_param)}", param=limit_param
        )
    if refusal.retry_after_s is None:
        return InsufficientQuota(f"The {refusal.whose}'s budget is used up: {amounts}.")
    return RateLimitExceeded(
        f"The {refusal.whose}'s budget is reserved by running requests: {amounts}.",
        retry_after_s=math.ceil(refusal.retry_after_s),
        limit=Kind.MONEY,
    )
