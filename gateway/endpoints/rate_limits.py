"""Limits of keys and teams over HTTP: refusals and headers as OpenAI's clients know them.

x-ratelimit-limit-requests, -remaining-requests, -reset-requests, and the same for tokens: of key or team, whichever
has less left. Concurrency and money have no headers.
"""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from db.accounts.principal import Principal
from db.money import NANO_USD, TokenPrice
from gateway.errors import InsufficientQuota, LimitsUnavailable, RateLimitExceeded, Refused
from gateway.http.pages import Exchange
from gateway.limits.leases import LimitReached, Quotas, Unavailable
from gateway.limits.local import LocalAccount, Refusal
from gateway.limits.reservation import Estimate, Reservation
from protocol.gateways import RATES, Kind
from protocol.generation import Pooling
from protocol.job import Sampling

_NAMES: Final = {
    Kind.REQUESTS: "requests per minute",
    Kind.TOKENS: "tokens per minute",
    Kind.CONCURRENT: "concurrent requests",
}
_HEADERS: Final = {
    kind: tuple(b"x-ratelimit-%s-%s" % (what, name) for what in (b"limit", b"remaining", b"reset"))
    for kind, name in ((Kind.REQUESTS, b"requests"), (Kind.TOKENS, b"tokens"))
}


class RequestedTokens(Protocol):
    """A request's demand for tokens."""

    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def sampling(self) -> Sampling: ...  # noqa: D102
    @property
    def pooling(self) -> Pooling | None: ...  # noqa: D102
    @property
    def limit_param(self) -> str | None: ...  # noqa: D102


_A_PLACE: Final = Estimate(0, 0)


async def reserve_place(quotas: Quotas, exchange: Exchange, principal: Principal) -> Reservation | None:
    """Reserve what is known before a body is read: one request, and that it runs. Returns and raises as ``reserve``."""
    return (await _reserve(quotas, exchange, principal, [_A_PLACE], None))[0]


@asynccontextmanager
async def counted(
    quotas: Quotas, exchange: Exchange, principal: Principal, *, failed_too: bool = False
) -> AsyncIterator[None]:
    """Count a request that uses no tokens, and that it runs. Raises as ``reserve``.

    ``failed_too``: also one that fails, because it costs as much until then.
    """
    reservation, is_counted = await reserve_place(quotas, exchange, principal), failed_too
    try:
        yield
        is_counted = True
    finally:
        if reservation is not None and is_counted:
            reservation.settle(0, 0, 0)
        elif reservation is not None:
            reservation.refund()


async def check_budget(
    quotas: Quotas, exchange: Exchange, principal: Principal, held: Reservation, price: TokenPrice | None
) -> None:
    """Refuse before the prompt is counted where the budget is used up. Raises as ``reserve``."""
    if price is not None:
        await _reserve(quotas, exchange, principal, [Estimate(1, 0, price)], held)


async def reserve(
    quotas: Quotas,
    exchange: Exchange,
    principal: Principal,
    spec: RequestedTokens,
    price: TokenPrice | None,
    *,
    held: Reservation | None = None,
) -> Reservation | None:
    """Reserve the most that a request can use; None: neither its key nor its team has limits.

    ``held``: what it has reserved already. Raises RateLimitExceeded, InsufficientQuota or LimitsUnavailable.
    """
    return (await _reserve(quotas, exchange, principal, [_estimate(spec, price)], held, limit_param=spec.limit_param))[
        0
    ]


async def reserve_all(
    quotas: Quotas,
    exchange: Exchange,
    principal: Principal,
    specs: Sequence[RequestedTokens],
    price: TokenPrice | None,
    *,
    held: Reservation | None = None,
) -> Sequence[Reservation | None]:
    """Reserve for several requests as ``reserve`` does for one, all or nothing. ``held``: of the first of them."""
    estimates = [_estimate(spec, price) for spec in specs]
    return await _reserve(quotas, exchange, principal, estimates, held, limit_param=specs[0].limit_param)


async def _reserve(
    quotas: Quotas,
    exchange: Exchange,
    principal: Principal,
    estimates: Sequence[Estimate],
    held: Reservation | None,
    *,
    limit_param: str | None = None,
) -> Sequence[Reservation | None]:
    try:
        reservations = await quotas.reserve(principal, estimates, held)
    except LimitReached as refused:
        exchange.limit_headers = _limit_headers(refused.local_accounts)
        raise _error_of(refused.refusal, limit_param) from refused
    except Unavailable as error:
        raise LimitsUnavailable from error
    if reservations is None:
        return [None] * len(estimates)
    exchange.limit_headers = _limit_headers(reservations[0].local_accounts)
    return reservations


def _estimate(work: RequestedTokens, price: TokenPrice | None) -> Estimate:
    completion_tokens = 0 if work.pooling is not None else work.sampling.max_tokens * work.sampling.n
    return Estimate(work.prompt_tokens, completion_tokens, price)


def _limit_headers(local_accounts: tuple[LocalAccount, ...]) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    for kind in RATES:
        known = [
            status for local in local_accounts if (status := local.rate_status(kind, local.clock.now_s())) is not None
        ]
        if known:
            tightest = min(known, key=lambda status: status.remaining)
            limit, remaining, reset = _HEADERS[kind]
            headers += [
                (limit, b"%d" % tightest.limit),
                (remaining, b"%d" % tightest.remaining),
                (reset, b"%ds" % math.ceil(tightest.reset_s)),
            ]
    return headers


def _error_of(refusal: Refusal, limit_param: str | None) -> Refused:
    """``limit_param``: the field by which the client makes the request smaller; None: there is none."""
    if refusal.kind is Kind.MONEY:
        return _budget_error(refusal, limit_param)
    name = _NAMES[refusal.kind]
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
    """Return the end of a sentence about a request's size, and what to do."""
    if limit_param is None:
        return ". Make it smaller."
    return f" (prompt and '{limit_param}', for each choice). Lower '{limit_param}' or shorten the prompt."


def _budget_error(refusal: Refusal, limit_param: str | None) -> Refused:
    amounts = (
        f"limit {refusal.limit / NANO_USD:.6g} USD, used {refusal.used / NANO_USD:.6g} USD, this request may cost up to"
        f" {refusal.needed / NANO_USD:.6g} USD"
    )
    if refusal.is_too_large:
        return InsufficientQuota(
            f"Request too large for the {refusal.whose}'s whole budget: {amounts}{_smaller(limit_param)}",
            param=limit_param,
            limit=Kind.MONEY,
        )
    if refusal.retry_after_s is None and refusal.used < refusal.limit:
        return InsufficientQuota(
            f"Too little is left of the {refusal.whose}'s budget: {amounts}{_smaller(limit_param)}", param=limit_param
        )
    if refusal.retry_after_s is None:
        return InsufficientQuota(f"The {refusal.whose}'s budget is used up: {amounts}.")
    return RateLimitExceeded(
        f"The {refusal.whose}'s budget is reserved by requests that are running: {amounts}.",
        retry_after_s=math.ceil(refusal.retry_after_s),
        limit=Kind.MONEY,
    )
