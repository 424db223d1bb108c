"""POST /v1/completions, also with several prompts: each is a request of its own, and their answers are written as one.

Choices are numbered as OpenAI does: prompt 0's first, then prompt 1's. All are admitted together, or none is; the first
that fails ends them all (``gateway.dispatch.stream``).
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from gateway.admission.control import Ticket
from gateway.api.answers import CompleteAnswer
from gateway.api.calls import CompletionCall
from gateway.api.schema import CompletionRequest
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.dispatch.stream import RequestGroup
from gateway.endpoints.endpoint import Answering, Arrival, JobSpec
from gateway.endpoints.generate import GenerationEndpoint, capture_of
from gateway.endpoints.rate_limits import reserve_all
from gateway.errors import RequestFailed
from gateway.http.exchange import Exchange
from gateway.limits.sizes import check_prompts
from gateway.payloads import RecordedAnswer, RecordedChunks
from gateway.request.mailbox import AnyTokens, Chunks, SharedMailbox
from gateway.request.request import Admission
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.job import Deltas, Tokens


class CompletionsEndpoint(GenerationEndpoint[CompletionCall]):
    """An ASGI application for plain completions."""

    async def _admit(self, arrival: Arrival[CompletionCall]) -> Answering:
        prompts = len(arrival.call.request.prompts)
        if prompts == 1:
            return await super()._admit(arrival)
        check_prompts(self._services.settings.limits, prompts)
        calls = arrival.call.parts()
        exchange, principal = arrival.exchange, arrival.principal
        await self._check_budget(arrival)
        specs = await self._specs(calls, arrival.tokens)
        reservations = await reserve_all(
            self._services.quotas, exchange, principal, specs, arrival.price, held=arrival.held
        )
        admissions = []
        for number, (spec, reservation) in enumerate(zip(specs, reservations, strict=True)):
            request_id = f"{exchange.request_id}-{number}"
            trace = None if exchange.trace is None else exchange.trace.part(request_id)
            admissions.append(self._admission(arrival, spec, reservation, request_id, trace, requests=len(specs)))
        self._refuse_if_revoked(principal)
        return partial(self._serve_all, exchange, calls, self._enter_all(admissions))

    async def _specs(self, calls: Sequence[CompletionCall], tokens: ModelTokens) -> Sequence[JobSpec]:
        specs = [await self._prompt_spec(calls[0], tokens)]
        for call in calls[1:]:
            await asyncio.sleep(0)  # others' requests go on: counting one prompt may take a millisecond
            specs.append(await self._prompt_spec(call, tokens))
        self._check_prompt_logprobs(calls[0].request, specs[0].sampling, sum(spec.prompt_tokens for spec in specs))
        return specs

    def _enter_all(self, admissions: Sequence[Admission]) -> Sequence[Ticket]:
        """Count all of them in, or none. Raises RequestFailed."""
        control = self._services.admission_control
        failure = self._services.dispatcher.refusal(len(admissions))  # counting may have taken a while
        tickets: list[Ticket] = []
        while failure is None and len(tickets) < len(admissions):
            admission = admissions[len(tickets)]
            failure = control.refusal(admission)
            if failure is None:
                tickets.append(control.enter(admission))
            else:
                failure = replace(failure, param=admission.prompt_param)
        if failure is None:
            return tickets
        for ticket in tickets:
            ticket.close()
        for admission in admissions:
            if admission.reservation is not None:
                admission.reservation.refund()
        raise RequestFailed(failure)

    async def _serve_all(self, exchange: Exchange, calls: Sequence[CompletionCall], tickets: Sequence[Ticket]) -> None:
        dispatcher = self._services.dispatcher
        mailbox = SharedMailbox(len(tickets))
        requests = [dispatcher.open(ticket, mailbox) for ticket in tickets]
        group = RequestGroup(requests)
        try:
            with exchange.calling_when_gone(lambda: group.cancel(time.monotonic())):
                await self._write_answers(exchange, calls, requests, group)
        except Exception as mistake:  # noqa: BLE001  # logged there
            await self._fail(exchange, requests[0], mistake)
        finally:
            for request in requests:
                dispatcher.close(request, exchange.seen(exchange.sent_status))
            if exchange.trace is not None:
                exchange.trace.parts_ended(exchange.sent_status)

    async def _write_answers(
        self,
        exchange: Exchange,
        calls: Sequence[CompletionCall],
        requests: Sequence[OpenRequest],
        group: RequestGroup,
    ) -> None:
        parts = {
            request.request_id: Part(call, request, self._new_answer(request))
            for call, request in zip(calls, requests, strict=True)
        }
        try:
            await self._write(exchange, MultiPromptAnswer(parts), group, None)
        finally:
            if group.state is State.ENDED and group.outcome == "ok":
                self._keep(parts.values())

    def _new_answer(self, request: OpenRequest) -> RecordedAnswer | None:
        wanted = request.admission.consent is not None
        return self._services.payloads.new_answer(len(request.choices)) if wanted else None

    def _keep(self, parts: Iterable["Part"]) -> None:
        for call, request, answer in parts:
            consent = request.admission.consent
            if consent is not None and answer is not None and answer.is_complete:
                self._services.payloads.take(capture_of(call, request, consent, answer))


class Part(NamedTuple):
    """One prompt."""

    call: CompletionCall
    request: OpenRequest
    answer: RecordedAnswer | None  # what remembers its answer, where that is to be kept


class MultiPromptAnswer:
    """Encodes the one answer to several prompts."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """``parts``: by the ids of their requests, in the order of the prompts."""
        self._parts = parts
        self._first = next(iter(parts.values())).call
        self.done, self.error_event = self._first.done, self._first.error_event
        self.before_end = self._first.before_end

    @property
    def request(self) -> CompletionRequest:
        """The first prompt's: they differ in nothing else."""
        return self._first.request

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Implement ``AnswerEncoder``."""
        return MultiPromptChunks({name: _chunks(part, answer_id, created) for name, part in self._parts.items()})

    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Implement ``AnswerEncoder``."""
        by_request: dict[str, list[AnyTokens]] = {name: [] for name in self._parts}
        for frame in frames:
            by_request[frame.request_id].append(frame)
        prompts = []
        for name, (call, _, answer) in self._parts.items():
            prompts.append(await call.rows(by_request.pop(name)))
            if answer is not None:
                answer.add_whole(prompts[-1].contents, b"")  # a completion calls no tools
        return self._first.answer_body(answer_id, created, prompts, usage)


def _chunks(part: Part, answer_id: str, created: int) -> Chunks:
    chunks = part.call.chunks(answer_id, created)
    return chunks if part.answer is None else RecordedChunks(chunks, part.answer)


class MultiPromptChunks:
    """``Chunks`` of several requests, each frame's by its own."""

    def __init__(self, chunks: Mapping[str, Chunks]) -> None:
        """``chunks``: by request id."""
        self.usage = next(iter(chunks.values())).usage
        self._chunks = chunks

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        return self._chunks[frame.request_id].of(frame)
