"""POST /v1/chat/completions and /v1/completions: the hot path."""

from gateway.api.calls import Call
from gateway.api.endpoint import Endpoint, Work
from gateway.api.errors import InvalidParameter, RequestFailed
from gateway.api.exchange import Exchange
from gateway.api.sampling import requested_max_tokens
from gateway.api.streaming import StreamWriter, usage_of
from gateway.dispatch.mailbox import Ended
from gateway.dispatch.request import OpenRequest, State
from gateway.limits.request_limits import check_prompt_logprobs, check_shape, output_limit
from gateway.payloads.answers import RecordedAnswer
from gateway.payloads.consent import Consent
from gateway.payloads.publisher import Capture
from gateway.tokens.model_tokens import use_of
from protocol.messages import Tokens, pack_token_ids


class GenerationEndpoint(Endpoint[Call]):
    """An ASGI application for one of the two generating routes."""

    async def _work(self, call: Call, model: str) -> Work:
        services = self._services
        check_shape(services.settings.limits, messages=call.message_count, choices=call.request.n or 1)
        tokens = services.catalog.tokens_of(model)
        if tokens.pooling is not None:
            raise InvalidParameter(f"The model `{model}` makes no text: {use_of(tokens)}.", param="model")
        prompt_ids = await call.encode_prompt(tokens)
        max_tokens = self._output_limit(call, model, tokens.context_length, len(prompt_ids))
        sampling = call.sampling(max_tokens)
        if sampling.prompt_logprobs is not None:
            param = "logprobs" if call.request.prompt_logprobs is None else "prompt_logprobs"
            check_prompt_logprobs(
                services.settings.limits,
                prompt_tokens=len(prompt_ids),
                candidates=sampling.prompt_logprobs,
                param=param,
            )
        return Work(pack_token_ids(prompt_ids), len(prompt_ids), sampling, stream=bool(call.request.stream))

    def _output_limit(self, call: Call, model: str, context_length: int, prompt_tokens: int) -> int:
        settings = self._services.settings
        return output_limit(
            settings.limits,
            settings.models[model],
            context_length=context_length,
            prompt_tokens=prompt_tokens,
            prompt_param=call.prompt_param,
            requested=requested_max_tokens(call.request),
            min_tokens=call.request.min_tokens or 0,
            choices=call.request.n or 1,
            usual_max_tokens=call.usual_max_tokens,
        )

    async def _write_answer(self, exchange: Exchange, call: Call, request: OpenRequest) -> None:
        if request.admission.consent is None:
            await self._write(exchange, call, request, None)
            return
        answer = self._services.payloads.new_answer(len(request.choices))
        try:
            await self._write(exchange, call, request, answer)
        finally:
            # Only what was answered whole is kept; also where the caller left when there was no more to come.
            if request.state is State.ENDED and request.outcome == "ok" and answer.is_complete:
                self._services.payloads.take(_capture(call, request, request.admission.consent, answer))

    async def _write(self, exchange: Exchange, call: Call, request: OpenRequest, answer: RecordedAnswer | None) -> None:
        if request.admission.stream:
            await StreamWriter(exchange, call, request, self._services.settings.timeouts, answer).write()
        else:
            await self._answer_whole(exchange, call, request, answer)

    async def _answer_whole(
        self, exchange: Exchange, call: Call, request: OpenRequest, answer: RecordedAnswer | None
    ) -> None:
        frames: list[Tokens] = []
        while True:
            for event in await request.mailbox.take():
                if isinstance(event, Tokens):
                    frames.append(event)
                elif isinstance(event, Ended):
                    await self._answer_end(exchange, call, request, frames, answer)
                    return

    async def _answer_end(
        self,
        exchange: Exchange,
        call: Call,
        request: OpenRequest,
        frames: list[Tokens],
        answer: RecordedAnswer | None,
    ) -> None:
        if request.failure is not None:
            await exchange.answer_error(RequestFailed(request.failure), request)
        elif request.outcome == "ok":
            created = exchange.received_unix_ms // 1000
            body = call.whole(exchange.id, created, frames, usage_of(request))
            if answer is not None:
                answer.add_whole(frames, body)
            await exchange.answer_json(body, request)


def _capture(call: Call, request: OpenRequest, consent: Consent, answer: RecordedAnswer) -> Capture:
    admission = request.admission
    return Capture(
        request_id=admission.request_id,
        received_unix_ms=admission.received_unix_ms,
        model=admission.model,
        key_id=admission.key_id,
        team_id=admission.team_id or "",
        end_user=call.request.user,
        consent=consent,
        call=call,
        body_bytes=admission.body_bytes,
        answer=answer,
    )
