"""Callers that ask all the time while something is done to the installation."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import httpx

CALLERS: Final = 8
REQUESTS_AT_LEAST: Final = 500
ANSWER_LIMIT_S: Final = 300.0
REST_LIMIT_S: Final = 1800.0  # for what is missing of REQUESTS_AT_LEAST when the change is over
MAX_TOKENS: Final = 16
END: Final = b"data: [DONE]"


@dataclass
class Tally:
    """What became of the requests."""

    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    longest_silence_s: float = 0.0  # within one answer, its beginning included

    @property
    def asked(self) -> int:
        return self.answered + self.failed.total()

    def __str__(self) -> str:
        failures = "".join(f"\n    {count} x {reason}" for reason, count in self.failed.most_common(10))
        failed = self.failed.total()
        return f"{failed} of {self.asked} requests failed, longest silence {self.longest_silence_s:.1f} s{failures}"


class Load:
    """Eight callers, two streams of three answers, from ``with`` to its end and until enough have asked."""

    def __init__(self, port: int, key: str, models: tuple[str, ...] = ("spillway-demo",)) -> None:
        self.tally = Tally()
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._key = key
        self._models = models
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._callers = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(CALLERS)]

    def __enter__(self) -> Self:
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline_s = time.monotonic() + REST_LIMIT_S
        while kind is None and self.tally.asked < REQUESTS_AT_LEAST and time.monotonic() < deadline_s:
            self._stopping.wait(0.1)
        self._stopping.set()
        for caller in self._callers:
            caller.join(ANSWER_LIMIT_S)

    def _call(self, number: int) -> None:
        turn = number
        with httpx.Client(timeout=ANSWER_LIMIT_S, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            while not self._stopping.is_set():
                self._ask(client, turn)
                turn += CALLERS

    def _ask(self, client: httpx.Client, turn: int) -> None:
        streams = turn % 3 > 0
        body = {
            "model": self._models[turn % len(self._models)],
            "stream": streams,
            "max_tokens": MAX_TOKENS,
            "messages": [{"role": "user", "content": f"What is Spillway? {turn}"}],
        }
        failure, silence_s, last_s = "", 0.0, time.monotonic()
        try:
            headers = {"Authorization": f"Bearer {self._key}"}
            with client.stream("POST", self._url, json=body, headers=headers) as answer:
                text = b""
                for piece in answer.iter_bytes():
                    silence_s, last_s = max(silence_s, time.monotonic() - last_s), time.monotonic()
                    text += piece
                is_whole = END in text if streams else b'"choices"' in text
                if answer.status_code != 200 or not is_whole:
                    failure = f"{answer.status_code} {text[-200:]!r}"
        except httpx.HTTPError as error:
            failure = repr(error)
        with self._lock:
            self.tally.longest_silence_s = max(self.tally.longest_silence_s, silence_s, time.monotonic() - last_s)
            if failure:
                self.tally.failed[failure] += 1
            else:
                self.tally.answered += 1
