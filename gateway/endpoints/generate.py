"""Operations that generate text: chats, completions, and APIs that are translated to chats."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from db.accounts.principal import Consent
from gateway.api.calls import AnswerEncoder, GenerationCall
from gateway.api.errors import AnswerStyle
from gateway.core import Core
from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.stream import AnswerStream
from gateway.endpoints.operation import CallFactory, Operation
from gateway.endpoints.parts import Part, PartsAnswer
from gateway.http.reply import usage_of
from gateway.payloads import Capture, PayloadPublisher, RecordedAnswer
from gateway.request.request import Arrival
from gateway.tokenizing.encoder_pool import EncoderPool

AnyGeneration = TypeVar("AnyGeneration", bound=GenerationCall[Any])


class Generation(Operation[AnyGeneration]):
    """An operation that generates text."""

    def __init__(
        self,
        core: Core,
        threads: EncoderPool,
        payloads: PayloadPublisher,
        call_of: CallFactory[AnyGeneration],
        style: AnswerStyle | None = None,
    ) -> None:
        """``payloads``: receives the requests and answers to be stored. See ``Operation``."""
        super().__init__(core, threads, call_of, style)
        self._payloads = payloads

    @contextmanager
    def encoder(self, stream: AnswerStream[AnyGeneration]) -> Iterator[AnswerEncoder]:
        """Yield the encoder of the answer; store a successful answer at the end if its key permits it."""
        parts = [Part(call, request, self._recorded(request)) for call, request in stream.parts]
        try:
            is_plain = len(parts) == 1 and parts[0].answer is None
            yield parts[0].call if is_plain else PartsAnswer(parts)
        finally:
            # Store only complete answers, including those whose client left after the last token.
            if all(request.is_over for request in stream.requests) and stream.outcome == "ok":
                for call, request, answer in parts:
                    if request.admission.consent is not None and answer is not None and answer.is_complete:
                        self._payloads.take(_capture_of(call, request, request.admission.consent, answer))

    def _recorded(self, request: OpenRequest) -> RecordedAnswer | None:
        wanted = request.admission.consent is not None
        return self._payloads.new_answer(len(request.choices)) if wanted else None

    async def whole(self, stream: AnswerStream[AnyGeneration], arrival: Arrival) -> bytes | AsyncIterator[bytes]:
        """Implement ``Operation``."""
        with self.encoder(stream) as encoder:
            whole = await encoder.whole(arrival.id, arrival.created_unix_s, stream.frames(), usage_of(stream))
        return whole.pieces() if whole.logprobs else whole.marked


def _capture_of(call: GenerationCall[Any], request: OpenRequest, consent: Consent, answer: RecordedAnswer) -> Capture:
    admission = request.admission
    return Capture(
        request_id=admission.request_id,
        received_unix_ms=admission.arrival.received_unix_ms,
        model=admission.model,
        key_id=admission.principal.key_id,
        team_id=admission.principal.team_id,
        end_user=call.request.user or call.request.safety_identifier,
        consent=consent,
        call=call,
        body_bytes=admission.arrival.body_bytes,
        answer=answer,
    )
