"""A closed loop: so many callers, each asking its next question as soon as it has its answer."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.http_client import Exchange, ReadTimeouts, exchange, get_request, post_request
from tests.chaos.background import joined, rest_of
from tests.chaos.mix import Question
from tests.chaos.oracle import Answer, BadAnswer, arrivals, read
from tests.chaos.played_answers import read_played
from tests.waiting import HANGS_S

ANSWER_LIMIT_S = 120.0
PATIENCE = ReadTimeouts(idle_s=ANSWER_LIMIT_S, total_s=ANSWER_LIMIT_S)
READY_LIMIT_S = HANGS_S
READY_POLL_S = 0.1
RETRIES = 20
RETRY_WAIT_S = 0.25
EXCUSED_S = 5.0  # after the kill: it is seen at once, but our own loop may be held up
BAD_GATEWAY = 502  # from the load balancer: the gateway is gone, and with it what it was asked
NO_GATEWAY = 503  # from the load balancer: there is none at all


@dataclass(slots=True)
class Call:
    """One question asked once by one caller, who may have had to ask again because a gateway died."""

    question: Question
    replies: list[Exchange] = field(default_factory=list)  # all but the last were cut off
    answer: Answer | None = None
    error: str | None = None

    @property
    def reply(self) -> Exchange:
        """The latest; of a response in the background, what all of them have brought."""
        return joined(self.replies) if self.question.is_background else self.replies[-1]

    @property
    def request_id(self) -> str | None:
        return self.reply.request_id if self.replies else None

    @property
    def is_mid_stream(self) -> bool:
        """True if tokens have arrived and more are due."""
        reply = self.reply if self.replies else None
        return bool(reply and not reply.ended_s and self.question.streams and len(reply.pieces) > 1)

    def arrivals(self) -> list[float]:
        return self.answer.arrivals_s if self.answer else arrivals(self.reply)


class Load:
    """Asks questions at the load balancer's port and keeps every call.

    A call that is cut off is an error, unless a gateway was killed just before: then its caller asks again.
    """

    def __init__(self, port: int, api_key: str, gateway_killed_s: Callable[[], float]) -> None:
        self.calls: list[Call] = []
        self.open: set[int] = set()  # indexes into ``calls``
        self._port = port
        self._api_key = api_key
        self._gateway_killed_s = gateway_killed_s
        self._stopping = False
        self._callers: list[asyncio.Task[None]] = []

    # --- one call -----------------------------------------------------------------------------------------------------

    async def ask(self, question: Question, port: int | None = None) -> Call:
        """Ask once, to the end; a complete answer is read, anything else becomes the call's error.

        ``port``: of a gateway, where it is not to go through the load balancer.
        """
        call = Call(question)
        index = len(self.calls)
        self.calls.append(call)
        self.open.add(index)
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await self._exchange(call, port or self._port)
            call.answer = (read_played if question.kind else read)(question, call.reply)
        except BadAnswer as error:
            call.error = str(error)
        except TimeoutError:
            call.error = f"no end within {ANSWER_LIMIT_S:g} s"
        finally:
            self.open.discard(index)
        return call

    async def _exchange(self, call: Call, port: int) -> None:
        question = call.question
        key = uuid.uuid4().hex
        asked = post_request(question.path, self._api_key, question.body, Idempotency_Key=key)
        while True:
            read_on = rest_of(call.replies) if question.is_background else None
            request = asked if read_on is None else get_request(read_on, self._api_key)
            reply = Exchange(time.monotonic())
            call.replies.append(reply)
            await exchange(port, request, PATIENCE, record=reply)
            if reply.ending != "whole":
                if not self._is_excused() or len(call.replies) == RETRIES:
                    raise BadAnswer(f"the answer has no end: {reply.ending}, HTTP {reply.status}")
            else:
                is_balancers = reply.status in {BAD_GATEWAY, NO_GATEWAY} and reply.request_id is None
                if not is_balancers or not self._is_excused():
                    return
                if reply.status == NO_GATEWAY:
                    call.replies.pop()  # nobody has been asked
            await asyncio.sleep(RETRY_WAIT_S)

    def _is_excused(self) -> bool:
        """Report whether a connection that just broke may be a killed gateway's."""
        return time.monotonic() - self._gateway_killed_s() < EXCUSED_S

    async def wait_until_served(self, question: Question, gateway_ports: Sequence[int]) -> None:
        """Ask at every gateway until it answers: the model's card may still be on its way. Raises TimeoutError."""
        deadline_s = time.monotonic() + READY_LIMIT_S
        for port in gateway_ports:
            while (call := await self.ask(question, port)).answer is None:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"nothing is served within {READY_LIMIT_S:g} s: {call.error}")
                await asyncio.sleep(READY_POLL_S)

    # --- many ---------------------------------------------------------------------------------------------------------

    async def ask_all(self, questions: Sequence[Question], callers: int) -> list[Call]:
        """Ask each once; returns the calls in the order of the questions."""
        gate = asyncio.Semaphore(callers)

        async def one(question: Question) -> Call:
            async with gate:
                return await self.ask(question)

        return await asyncio.gather(*map(one, questions))

    def start(self, questions: Sequence[Question], callers: int, seed: int) -> None:
        """Let so many callers ask, each from its own seeded shuffle, until ``finish``."""
        for number in range(callers):
            rng = random.Random(f"caller {seed} {number}")
            self._callers.append(asyncio.create_task(self._ask_on(questions, rng)))

    async def _ask_on(self, questions: Sequence[Question], rng: random.Random) -> None:
        await asyncio.sleep(rng.random() * 0.5)  # not all at the same moment
        while not self._stopping:
            await self.ask(rng.choice(questions))

    async def finish(self) -> None:
        """Ask nothing new and wait for what is open."""
        self._stopping = True
        await asyncio.gather(*self._callers)

    def open_calls(self) -> list[Call]:
        """Return the calls that have no end yet."""
        return [self.calls[index] for index in self.open]

    def mid_stream(self, of: Callable[[str], bool]) -> list[str]:
        """The ids of the requests in mid-stream for which ``of`` holds."""
        ids = [call.request_id for call in self.open_calls() if call.is_mid_stream]
        return [request_id for request_id in ids if request_id is not None and of(request_id)]
