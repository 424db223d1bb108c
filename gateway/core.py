"""The core: turns a call into requests, and their events into one stream. Independent of HTTP.

    call, arrival ──admit──> counted, nothing published ──start──> AnswerStream: exactly one record of each request

Between the two the call can still be undone (``Admitted.refund``). Raises only ``Refused``.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic

from msgspec.structs import replace

from db.accounts.keyring import KeyRing
from db.accounts.principal import Principal
from db.money import TokenPrice
from gateway.admission.control import AdmissionControl, Ticket
from gateway.admission.hosted import check_trust, providers_for
from gateway.dispatch.dispatcher import KEY_REVOKED, Dispatcher
from gateway.dispatch.stream import AnswerStream
from gateway.errors import LimitsUnavailable, RateStatus, RequestFailed
from gateway.limits.leases import LimitReached, Quotas, Unavailable
from gateway.limits.prices import CurrentPrices
from gateway.limits.refusals import rates_of, refused_by
from gateway.limits.reservation import Estimate, Reservation
from gateway.request.mailbox import SharedMailbox
from gateway.request.request import Admission, AnyCall, Arrival, Call, PartialAnswer, Prompt, Trace
from gateway.request.tags import request_tags
from gateway.settings import GatewaySettings
from gateway.tokenizing.catalog import ModelCatalog
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.gateways import Kind
from protocol.job import NO_TOKENIZER
from protocol.usage import Tags

_A_PLACE: Final = Estimate(0, 0)


@dataclass(slots=True)
class Admitted(Generic[AnyCall]):
    """An admitted call. It must be started or refunded."""

    calls: Sequence[AnyCall]  # its parts
    tickets: Sequence[Ticket]
    trace: Trace | None
    on_close: Callable[[], None] | None = None  # called when the call is refunded, or its stream is closed

    @property
    def rates(self) -> Mapping[Kind, RateStatus]:
        """Use of the rate limits of the call's key and team; empty: they have none."""
        reservation = self.tickets[0].admission.reservation
        return {} if reservation is None else rates_of(reservation.local_accounts)

    def refund(self) -> None:
        """Undo the admission instead of starting the call."""
        for ticket in self.tickets:
            ticket.close()
            if ticket.admission.reservation is not None:
                ticket.admission.reservation.refund()
        if self.on_close is not None:
            self.on_close()


@dataclass(frozen=True, slots=True)
class Core:
    """Admits and starts calls."""

    settings: GatewaySettings
    keys: KeyRing
    catalog: ModelCatalog
    dispatcher: Dispatcher
    admission_control: AdmissionControl
    quotas: Quotas
    prices: CurrentPrices

    # --- before the body is known -------------------------------------------------------------------------------------

    def refuse_if_full(self, requests: int = 1) -> None:
        """Raise RequestFailed if so many requests cannot be admitted now."""
        failure = self.dispatcher.refusal(requests)
        if failure is not None:
            raise RequestFailed(failure)

    async def hold(self, principal: Principal) -> Reservation | None:
        """Reserve one request and one concurrent request before a large body is read; None: no limits.

        Raises RateLimitExceeded, InsufficientQuota or LimitsUnavailable.
        """
        return (await self._reserve(principal, [_A_PLACE], None))[0]

    # --- admission ----------------------------------------------------------------------------------------------------

    async def admit(
        self, principal: Principal, call: AnyCall, arrival: Arrival, *, held: Reservation | None = None
    ) -> Admitted[AnyCall]:
        """Admit all parts of a call, or none. ``held``: what ``hold`` reserved; it is refunded if this raises.

        Raises Refused.
        """
        reservations: list[Reservation | None] = [held]
        try:
            if principal.is_batch_only:
                call.serve_as_batch()
            asked = call.request
            model = self.catalog.canonical_name(asked.model, principal)
            check_trust(self.settings, principal, model)
            leaves = self.admission_control.hosted_leaves(principal)
            hosted = providers_for(self.settings, principal, leaves, model, asked=asked.allow_hosted)
            tokens = self.catalog.tokens_of(model).of_tenant(principal.tenant)
            tags = request_tags(arrival.tags, asked.metadata)
            price = self.prices.of(model, arrival.received_unix_ms)
            calls = call.parts(self.settings)
            if held is not None and price is not None:  # before a large prompt is tokenized in vain
                await self._reserve(principal, [Estimate(1, 0, price)], held)
            prompts = await self._prompts(calls, tokens)
            estimates = [_estimate(prompt, price) for prompt in prompts]
            reservations = await self._reserve(principal, estimates, held, limit_param=prompts[0].limit_param)
            self._refuse_if_revoked(principal)
            self.refuse_if_full(len(prompts))  # again: tokenizing may have taken a while
            arrivals = _arrivals(arrival, len(prompts))
            admissions = [
                self._admission(
                    principal,
                    call,
                    tokens,
                    arrival=each,
                    prompt=prompt,
                    reservation=reservation,
                    hosted=hosted,
                    tags=tags,
                )
                for each, prompt, reservation in zip(arrivals, prompts, reservations, strict=True)
            ]
            return Admitted(calls, self._enter_all(admissions), arrival.trace)
        except BaseException:
            for reservation in reservations:
                if reservation is not None:
                    reservation.refund()
            raise

    def _refuse_if_revoked(self, principal: Principal) -> None:
        """Raise RequestFailed if the key was revoked while the body was read or tokenized."""
        if self.keys.is_revoked(principal.key_id):
            raise RequestFailed(KEY_REVOKED)

    async def _prompts(self, calls: Sequence[AnyCall], tokens: ModelTokens) -> list[Prompt]:
        prompts = [await calls[0].prompt(tokens, self.settings)]
        for call in calls[1:]:
            await asyncio.sleep(0)  # let other requests run: tokenizing one prompt may take a millisecond
            prompts.append(await call.prompt(tokens, self.settings))
        calls[0].check(prompts, self.settings)
        return prompts

    def _admission(
        self,
        principal: Principal,
        call: Call,
        tokens: ModelTokens,
        *,
        arrival: Arrival,
        prompt: Prompt,
        reservation: Reservation | None,
        hosted: tuple[str, ...],
        tags: Tags | None,
    ) -> Admission:
        return Admission(
            arrival=arrival,
            endpoint=call.name,
            model=tokens.model,
            principal=principal,
            prompt=prompt,
            admitted_s=time.monotonic(),
            batch=call.request.is_batch,
            weight=self.admission_control.weight_of(principal),
            do_not_queue=bool(call.request.do_not_queue),
            tokenizer=tokens.tokenizer if prompt.token_ids or prompt.conversation is None else NO_TOKENIZER,
            hosted=hosted,
            reservation=reservation,
            tags=tags,
        )

    def _enter_all(self, admissions: Sequence[Admission]) -> list[Ticket]:
        """Enter all of them, or none. Raises RequestFailed."""
        tickets: list[Ticket] = []
        for admission in admissions:
            failure = self.admission_control.refusal(admission)
            if failure is not None:
                for ticket in tickets:
                    ticket.close()
                is_only = len(admissions) == 1
                raise RequestFailed(failure if is_only else replace(failure, param=admission.prompt.param))
            tickets.append(self.admission_control.enter(admission))
        return tickets

    # --- start --------------------------------------------------------------------------------------------------------

    def start(self, admitted: Admitted[AnyCall], *, partial: PartialAnswer | None = None) -> AnswerStream[AnyCall]:
        """Publish an admitted call. ``partial``: the part of its answer that another gateway received."""
        tickets = admitted.tickets
        mailbox = None if len(tickets) == 1 else SharedMailbox(len(tickets))
        requests = [self.dispatcher.open(ticket, mailbox, partial) for ticket in tickets]
        return AnswerStream(admitted.calls, requests, self.dispatcher, trace=admitted.trace, on_close=admitted.on_close)

    # --- limits -------------------------------------------------------------------------------------------------------

    async def _reserve(
        self,
        principal: Principal,
        estimates: Sequence[Estimate],
        held: Reservation | None,
        *,
        limit_param: str | None = None,
    ) -> list[Reservation | None]:
        """Reserve the most that requests can use, all or nothing; None: neither the key nor its team has limits.

        ``held``: what the first of them has already reserved; ``limit_param``: the field that reduces their size.
        Raises RateLimitExceeded, InsufficientQuota or LimitsUnavailable.
        """
        try:
            reservations = await self.quotas.reserve(principal, estimates, held)
        except LimitReached as refused:
            error = refused_by(refused.refusal, limit_param)
            error.rates = rates_of(refused.local_accounts)
            raise error from refused
        except Unavailable as error:
            raise LimitsUnavailable from error
        return [None] * len(estimates) if reservations is None else [*reservations]


def _arrivals(arrival: Arrival, parts: int) -> Sequence[Arrival]:
    """Return the arrival of each part of a call."""
    return [arrival] if parts == 1 else [arrival.part(number, parts) for number in range(parts)]


def _estimate(prompt: Prompt, price: TokenPrice | None) -> Estimate:
    completion_tokens = 0 if prompt.pooling is not None else prompt.sampling.max_tokens * prompt.sampling.n
    return Estimate(prompt.tokens, completion_tokens, price)
