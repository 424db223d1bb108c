"""POST /v1/chat/completions and /v1/completions: the hot path."""

import asyncio
from typing import TypeVar

from db.accounts.principal import Consent
from gateway.api.calls import AnswerEncoder, Call
from gateway.api.sampling import requested_max_tokens
from gateway.api.schema import GenerationRequest
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.endpoints.endpoint import Endpoint, JobSpec
from gateway.errors import InvalidParameter, RequestFailed
from gateway.http.exchange import Answered, Exchange
from gateway.http.reply import StreamWriter, usage_of
from gateway.limits.sizes import check_grammar, check_prompt_logprobs, check_shape, output_limit
from gateway.payloads import Capture, RecordedAnswer
from gateway.request.mailbox import ReaderCut
from gateway.tokenizing.model_tokens import ModelTokens, use_of
from protocol.job import Sampling, pack_token_ids

_Call = TypeVar("_Call", bound=Call)


class GenerationEndpoint(Endpoint[_Call]):
    """An ASGI application for one of the two generating routes."""

    async def _spec(self, call: _Call, tokens: ModelTokens) -> JobSpec:
        spec = await self._prompt_spec(call, tokens)
        self._check_prompt_logprobs(call.request, spec.sampling, spec.prompt_tokens)
        return spec

    def _check_prompt_logprobs(self, request: GenerationRequest, sampling: Sampling, prompt_tokens: int) -> None:
        """``prompt_tokens``: of all prompts of the body."""
        if sampling.prompt_logprobs is not None:
            check_prompt_logprobs(
                self._services.settings.limits,
                prompt_tokens=prompt_tokens,
                candidates=sampling.prompt_logprobs,
                param="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
            )

    async def _prompt_spec(self, call: _Call, tokens: ModelTokens) -> JobSpec:
        """Count and check one prompt. Raises ApiError."""
        check_shape(self._services.settings.limits, messages=call.message_count, choices=call.request.n or 1)
        if tokens.pooling is not None:
            raise InvalidParameter(f"The model `{tokens.model}` makes no text: {use_of(tokens)}.", param="model")
        prompt_ids = await call.encode_prompt(tokens)
        sampling = call.sampling(self._output_limit(call, tokens, len(prompt_ids)))
        if sampling.grammar is not None:
            check_grammar(sampling.grammar)
        return JobSpec(
            b"" if call.is_counted_only else pack_token_ids(prompt_ids),
            len(prompt_ids),
            call.prompt_param,
            sampling,
            stream=bool(call.request.stream),
            conversation=call.conversation(tokens, sampling.max_tokens, len(prompt_ids)),
            adapted=call.adapted,
            limit_param=(requested_max_tokens(call.request) or ("max_tokens",))[0],
        )

    def _output_limit(self, call: _Call, tokens: ModelTokens, prompt_tokens: int) -> int:
        settings = self._services.settings
        return output_limit(
            settings.limits,
            settings.models[tokens.model],
            context_length=tokens.context_length,
            prompt_tokens=prompt_tokens,
            prompt_param=call.prompt_param,
            requested=requested_max_tokens(call.request),
            min_tokens=call.request.min_tokens or 0,
            choices=call.request.n or 1,
            usual_max_tokens=call.usual_max_tokens,
        )

    async def _write_answer(self, exchange: Exchange, call: _Call, request: OpenRequest) -> None:
        if request.admission.consent is None:
            await self._write(exchange, call, request, None)
            return
        answer = self._services.payloads.new_answer(len(request.choices))
        try:
            await self._write(exchange, call, request, answer)
        finally:
            # Only what was answered whole is kept; also where the caller left when there was no more to come.
            if request.state is State.ENDED and request.outcome == "ok" and answer.is_complete:
                self._services.payloads.take(capture_of(call, request, request.admission.consent, answer))

    async def _write(
        self, exchange: Exchange, maker: AnswerEncoder, request: Answered, answer: RecordedAnswer | None
    ) -> None:
        if maker.request.stream:
            await StreamWriter(exchange, maker, request, self._services.settings.timeouts, answer).write()
        else:
            await self._answer_whole(exchange, maker, request, answer)

    async def _answer_whole(
        self, exchange: Exchange, maker: AnswerEncoder, request: Answered, answer: RecordedAnswer | None
    ) -> None:
        try:
            await request.mailbox.wait_for_end()
            if request.failure is not None:
                await exchange.answer_error(RequestFailed(request.failure), request)
            elif request.outcome == "ok":
                async with asyncio.timeout(None) as limit:
                    # Until it is read it counts: where that is too much, its reader is given up.
                    request.mailbox.on_cut = lambda: limit.reschedule(0.0)
                    await self._answer_ok(exchange, maker, request, answer)
        except (TimeoutError, ReaderCut):
            exchange.abort()
        finally:
            request.mailbox.on_cut = None

    async def _answer_ok(
        self, exchange: Exchange, maker: AnswerEncoder, request: Answered, answer: RecordedAnswer | None
    ) -> None:
        created = exchange.received_unix_ms // 1000
        whole = await maker.whole(exchange.id, created, request.mailbox.tokens(), usage_of(request))
        if answer is not None:
            answer.add_whole(whole.contents, whole.body)
        if whole.logprobs:
            await exchange.answer_pieces(whole.pieces(), request)
        else:
            await exchange.answer_json(whole.marked, request)


def capture_of(call: Call, request: OpenRequest, consent: Consent, answer: RecordedAnswer) -> Capture:
    """Return the payload of an answered request."""
    admission = request.admission
    return Capture(
        request_id=admission.request_id,
        received_unix_ms=admission.received_unix_ms,
        model=admission.model,
        key_id=admission.principal.key_id,
        team_id=admission.principal.team_id,
        end_user=call.request.user or call.request.safety_identifier,
        consent=consent,
        call=call,
        body_bytes=admission.body_bytes,
        answer=answer,
    )
