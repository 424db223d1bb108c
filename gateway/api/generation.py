"""POST /v1/chat/completions and /v1/completions: the hot path, in plain ASGI.

authenticate → refuse if full → read the body → validate → count the prompt → check limits → open → answer
"""

import asyncio
import logging
import time
from collections.abc import Callable

from gateway.api import patience
from gateway.api.calls import Call
from gateway.api.errors import ApiError, BodyTooSlow, ClientDisconnected, MethodNotAllowed, RequestFailed
from gateway.api.exchange import Exchange, Receive, Scope, Send
from gateway.api.keyed import IDEMPOTENCY_KEY
from gateway.api.sampling import requested_max_tokens, sampling_of
from gateway.api.services import Services
from gateway.api.streaming import StreamWriter, usage_of
from gateway.dispatch.admission import Admission
from gateway.dispatch.mailbox import Ended
from gateway.dispatch.request import OpenRequest
from gateway.limits.body import read_body
from gateway.limits.request_limits import check_shape, output_limit
from protocol.messages import Tokens, pack_token_ids

log = logging.getLogger(__name__)


class GenerationEndpoint:
    """An ASGI application for one of the two generating routes."""

    def __init__(self, services: Services, call_of: Callable[[bytes], Call]) -> None:
        self._services = services
        self._call_of = call_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        exchange = Exchange(scope, receive, send)
        if IDEMPOTENCY_KEY in exchange.headers:
            await self._services.keyed.serve(exchange, scope, self._read_body, self._answer)
        else:
            await self._answer(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            call, admission = await self._admit(exchange)
        except ApiError as error:
            await exchange.answer_error(error)
        except ClientDisconnected:
            return
        except Exception:
            log.exception("request %s failed before it was admitted", exchange.request_id)
            await exchange.answer_error(ApiError())
        else:
            await self._serve(exchange, call, admission)

    # --- until the request is admitted --------------------------------------------------------------------------------

    async def _admit(self, exchange: Exchange) -> tuple[Call, Admission]:
        services = self._services
        if exchange.method != "POST":
            raise MethodNotAllowed(f"Use POST, not {exchange.method}.")
        principal = exchange.authenticate(services.keys)
        self._refuse_if_full()
        call = self._call_of(await self._read_body(exchange))
        check_shape(services.settings.limits, messages=call.message_count, choices=call.request.n or 1)
        model = services.catalog.canonical_name(call.request.model)
        deadline_s = patience.deadline_s(exchange)
        tokens = services.catalog.tokens_of(model)
        prompt_ids = await call.encode_prompt(tokens)
        max_tokens = self._output_limit(call, model, tokens.context_length, len(prompt_ids))
        admission = Admission(
            request_id=exchange.request_id,
            endpoint=call.name,
            model=model,
            key_id=principal.key_id,
            key_name=principal.key_name,
            tenant=principal.tenant,
            stream=bool(call.request.stream),
            prompt_ids=pack_token_ids(prompt_ids),
            prompt_tokens=len(prompt_ids),
            sampling=sampling_of(call.request, max_tokens),
            received_s=exchange.received_s,
            received_unix_ms=exchange.received_unix_ms,
            admitted_s=time.monotonic(),
            queue_wait_s=patience.queue_wait_s(exchange, deadline_s, services.settings.timeouts.queue_wait_s),
            traceparent=exchange.header_text(b"traceparent"),
            batch=call.request.is_batch,
            weight=services.admission_control.weight_of(principal),
            do_not_queue=bool(call.request.do_not_queue),
            deadline_s=deadline_s,
        )
        self._refuse_if_full()  # counting may have taken a while
        refusal = services.admission_control.refusal(admission)
        if refusal is not None:
            raise RequestFailed(refusal)
        return call, admission

    async def _read_body(self, exchange: Exchange) -> bytes:
        settings = self._services.settings
        length = exchange.headers.get(b"content-length")
        try:
            async with asyncio.timeout(settings.timeouts.body_s):
                body = await read_body(exchange.receive, length, settings.limits.max_body_bytes)
        except TimeoutError as error:
            raise BodyTooSlow(f"The request body did not arrive within {settings.timeouts.body_s:g} s.") from error
        exchange.start_clock()  # a slow upload is not ours
        return body

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

    def _refuse_if_full(self) -> None:
        failure = self._services.dispatcher.refusal()
        if failure is not None:
            raise RequestFailed(failure)

    # --- from there on ------------------------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange, call: Call, admission: Admission) -> None:
        dispatcher = self._services.dispatcher
        request = dispatcher.open(admission)
        watcher = asyncio.create_task(self._cancel_when_gone(exchange, request))
        try:
            if admission.stream:
                await StreamWriter(exchange, call, request, self._services.settings.timeouts).write()
            else:
                await self._answer_whole(exchange, call, request)
        except Exception:
            log.exception("request %s failed while it was answered", request.request_id)
            if exchange.sent_status is None:
                await exchange.answer_error(ApiError(), request)
        finally:
            watcher.cancel()
            dispatcher.close(request, exchange.seen_status)

    async def _cancel_when_gone(self, exchange: Exchange, request: OpenRequest) -> None:
        await exchange.wait_until_gone()
        request.cancel(time.monotonic())

    async def _answer_whole(self, exchange: Exchange, call: Call, request: OpenRequest) -> None:
        frames: list[Tokens] = []
        while True:
            for event in await request.mailbox.take():
                if isinstance(event, Tokens):
                    frames.append(event)
                elif isinstance(event, Ended):
                    await self._answer_end(exchange, call, request, frames)
                    return

    async def _answer_end(self, exchange: Exchange, call: Call, request: OpenRequest, frames: list[Tokens]) -> None:
        if request.failure is not None:
            await exchange.answer_error(RequestFailed(request.failure), request)
        elif request.outcome == "ok":
            created = exchange.received_unix_ms // 1000
            await exchange.answer_json(call.whole(exchange.id, created, frames, usage_of(request)), request)
