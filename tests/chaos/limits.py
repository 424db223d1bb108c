"""``python -m tests.chaos.limits`` or ``make limits``: every limit at its edge, over three real gateways.

200 callers ask as fast as they are let, each limit with a key of its own; the clock of one gateway is 10 s ahead:

    admitted <= limit, always, and at least 95 % of it is used;
    a gateway is killed with what it holds: what ran there comes back with its lease;
    callers hang up at any moment: nothing stays reserved;
    the ledger has counted each refusal that a caller has got, and no other.

The last line is one JSON object; the exit code is 1 if a promise was broken.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import psutil
from nats.aio.msg import Msg

from benchmarks.http_client import Exchange, ReadTimeouts, exchange, post_request
from benchmarks.stream_answer import read
from db.accounts.principal import Policy
from gateway.limits.account import CLOCK_SLACK_S, LEASE_S, AccountStore
from gateway.settings import REACH_LIMIT_S
from protocol import subjects
from protocol.gateways import NOTHING
from protocol.job import Accepted, Failed, Finished, decode_step
from spillway.children import Child
from tests.chaos.ledger import settled_refusals
from tests.chaos.system import MODEL, Shape, System
from tests.waiting import HANGS_S

CALLERS = 200
GATEWAYS = 3
TOKENS = 20
NANO_USD_PER_TOKEN = 1_000  # 1 USD for a million
LEAST_USED = 0.95
AHEAD_S = 10.0  # the clock of one of the gateways: limits go by the queue server's
SHAPE = Shape(
    gateways=GATEWAYS,
    workers=2,
    max_sequences=64,
    price={"completion": NANO_USD_PER_TOKEN / 1000},
    clocks_ahead_s=(0.0, AHEAD_S),
)
TIMEOUTS = ReadTimeouts(idle_s=30.0, total_s=60.0)
READY_LIMIT_S = HANGS_S
FREE_LIMIT_S = 15.0
ASK_S = 0.5  # until one of the refused callers has asked again, which is when a lease is seen to be over
REOPEN_S = 3.0  # until so many have asked again that all places are taken, and workers have begun
POLL_S = 0.02
LONGEST_STORM_S = 40.0  # on a slow machine; in a minute a window would come back
AFTER_LIMIT_S = 1.0  # from the first refusal of one gateway until the others' shares are used up


@dataclass(frozen=True)
class Limits:
    """The limit that each key has."""

    requests: int = 300  # a minute
    tokens: int = 20_000  # a minute
    concurrent: int = 40
    budget_tokens: int = 5_000

    def policies(self) -> dict[str, Policy]:
        """Return the limits by the key's name."""
        budget_nano_usd = self.budget_tokens * NANO_USD_PER_TOKEN
        return {
            "requests": Policy(requests_per_minute=self.requests),
            "tokens": Policy(tokens_per_minute=self.tokens),
            "concurrent": Policy(max_concurrent=self.concurrent),
            "budget": Policy(budget_nano_usd=budget_nano_usd, budget_period="total"),
            "all": Policy(10**6, 10**8, 400, 10**15, "month"),
        }


FULL: Final = Limits()


@dataclass
class Findings:
    """Figures, and what was broken."""

    figures: dict[str, Any] = field(default_factory=dict)
    offences: list[str] = field(default_factory=list)

    def expect(self, name: str, value: float, *, at_least: float = float("-inf"), at_most: float) -> None:
        self.figures[name] = round(value, 3)
        if not at_least <= value <= at_most:
            self.offences.append(f"{name} is {value:.3f}, and must be from {at_least:.3f} to {at_most:.3f}")


class Running:
    """The number of running attempts. A gateway frees a slot when it receives an end, which this test also sees."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.most = 0

    async def on_step(self, message: Msg) -> None:
        for frame in decode_step(message.data).frames:
            if isinstance(frame, Accepted):
                self.now.add(frame.request_id)
                self.most = max(self.most, len(self.now))
            elif isinstance(frame, Finished | Failed):
                self.now.discard(frame.request_id)


class Storm:
    """Callers of one system, spread over its living gateways."""

    def __init__(self, system: System, limits: Limits, seed: int, callers: int) -> None:
        self.system = system
        self.limits = limits
        self._callers = callers
        self._numbers = itertools.count()
        self._rng = random.Random(f"limits {seed}")
        self.refused = Counter[str]()  # by key

    async def ask(self, key: str, leave: asyncio.Event | None = None, port: int | None = None) -> Exchange:
        number = next(self._numbers)
        body = {
            "model": MODEL,
            "max_tokens": TOKENS,
            "messages": [{"role": "user", "content": f"Question {number}: what of it? [[tokens={TOKENS}]]"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = post_request("/v1/chat/completions", self.system.tenant_keys[key], body)
        answer = await exchange(port or self.system.port, request, TIMEOUTS, leave=leave)
        self.refused[key] += answer.status is not None and answer.status >= HTTPStatus.BAD_REQUEST
        return answer

    async def blow(self, key: str, seconds: float) -> list[Exchange]:
        """All that was answered while so many asked again and again, and at the least until the limit was met."""
        began_s, answers = time.monotonic(), []
        until_s, met = began_s + seconds, False

        async def caller() -> None:
            nonlocal until_s, met
            while (now_s := time.monotonic()) < until_s or (not met and now_s < began_s + LONGEST_STORM_S):
                answers.append(await self.ask(key))
                if answers[-1].status != 200:
                    if not met:
                        met, until_s = True, max(until_s, time.monotonic() + AFTER_LIMIT_S)
                    await asyncio.sleep(self._rng.uniform(0.1, 0.3))

        await asyncio.gather(*(caller() for _ in range(self._callers)))
        return answers

    async def leave_anywhen(self, key: str, count: int) -> Counter[str]:
        """Send ``count`` requests and disconnect, some before admission, some after the end."""
        gate, endings = asyncio.Semaphore(self._callers), Counter[str]()

        async def one(after_s: float) -> None:
            async with gate:
                leave = asyncio.Event()
                asyncio.get_running_loop().call_later(after_s, leave.set)
                answer = await self.ask(key, leave)
                endings[f"{answer.ending} {answer.status}"] += 1

        longest_s = 2 * TOKENS * self.system.shape.inter_token_s
        await asyncio.gather(*(one(self._rng.uniform(0.0, longest_s)) for _ in range(count)))
        return endings

    async def wait_until_served(self) -> None:
        """Wait until every gateway knows the model. Raises AssertionError with the last other answer."""
        deadline_s = time.monotonic() + READY_LIMIT_S
        for gateway, port in zip(self.system.gateways, self.system.gateway_ports, strict=True):
            while (answer := await self.ask("all", port=port)).status != 200:
                said = (
                    f"{gateway.name} does not serve: {answer.ending} {answer.status} {_text(answer)}\n"
                    f"  {gateway.last_lines()}"
                )
                assert time.monotonic() < deadline_s, said
                await asyncio.sleep(POLL_S)


async def edges(storm: Storm, findings: Findings, seconds: float) -> None:
    """Each rate and the budget at its limit. A storm lasts less than a minute, so that no window comes back."""
    requests = _admitted(await storm.blow("requests", seconds), findings)
    findings.expect("requests_used", len(requests) / storm.limits.requests, at_least=LEAST_USED, at_most=1)
    tokens = sum(_tokens(one, prompt=True) for one in _admitted(await storm.blow("tokens", seconds), findings))
    findings.expect("tokens_used", tokens / storm.limits.tokens, at_least=LEAST_USED, at_most=1)
    made = sum(_tokens(one, prompt=False) for one in _admitted(await storm.blow("budget", seconds), findings))
    findings.expect("budget_used", made / storm.limits.budget_tokens, at_least=LEAST_USED, at_most=1)


def _admitted(answers: list[Exchange], findings: Findings) -> list[Exchange]:
    statuses = Counter(one.status for one in answers)
    findings.figures.setdefault("answers", []).append({str(status): count for status, count in statuses.items()})
    others = Counter(f"{one.status} {_text(one)}" for one in answers if one.status not in {200, 429})
    if others:
        findings.offences.append(f"answers of other kinds: {others}")
    return [one for one in answers if one.status == 200]


def _text(answered: Exchange) -> str:
    return b"".join(piece for _, piece in answered.pieces).decode()


def _tokens(answered: Exchange, *, prompt: bool) -> int:
    answer = read(answered)
    return (answer.completion_tokens or 0) + ((answer.prompt_tokens or 0) if prompt else 0)


async def concurrency(storm: Storm, findings: Findings, seconds: float, *, kill: bool) -> None:
    """Run as many requests at a time as the limit allows; then kill one of the gateways, with all that runs there."""
    running, concurrent = Running(), storm.limits.concurrent
    tap = await storm.system.bus.subscribe(subjects.frames_subject(">"), running.on_step)
    await storm.blow("concurrent", seconds)
    findings.expect("concurrent_used", running.most / concurrent, at_least=LEAST_USED, at_most=1)
    if kill:
        limit_s = LEASE_S + CLOCK_SLACK_S
        freed_s, back_s = await _kill_one(storm, running)
        findings.expect("freed_after_kill_s", freed_s, at_most=limit_s + ASK_S)
        findings.expect("back_after_kill_s", back_s, at_most=limit_s + REOPEN_S)
        findings.expect("concurrent_after_kill", running.most / concurrent, at_least=LEAST_USED, at_most=1)
    await tap.unsubscribe()


async def _kill_one(storm: Storm, running: Running) -> tuple[float, float]:
    """SIGKILL a gateway in the middle; returns how long it takes until its places are free, and all taken again.

    The first is what the gateways promise; what comes on top of it are callers and workers.
    """
    longest_s = LEASE_S + CLOCK_SLACK_S + 4
    blowing = asyncio.create_task(storm.blow("concurrent", longest_s + 1))
    await asyncio.sleep(1.0)
    await storm.system.kill(storm.system.gateways[0])
    killed_s = time.monotonic()
    freeing = asyncio.create_task(_until_forgotten(storm.system, killed_s + longest_s))
    await asyncio.sleep(2 * TOKENS * storm.system.shape.inter_token_s)  # its last answers end
    while len(running.now) < LEAST_USED * storm.limits.concurrent and time.monotonic() - killed_s < longest_s:
        await asyncio.sleep(POLL_S)
    back_s = time.monotonic() - killed_s
    await blowing
    return await freeing - killed_s, back_s


async def refusals(storm: Storm, findings: Findings) -> None:
    """Compare what callers were refused with what the ledger has counted, for keys whose gateways have all lived."""
    for key in ("requests", "tokens", "budget"):
        told = storm.refused[key]
        counted = await settled_refusals(storm.system.database, storm.system.key_ids[key], told)
        findings.expect(f"refusals_counted_{key}", counted, at_least=max(told, 1), at_most=told)


async def _until_forgotten(system: System, latest_s: float) -> float:
    """Return the time when the account has no more leases than gateways remain, or ``latest_s``."""
    account_store, key_id = AccountStore(system.bus), system.key_ids["concurrent"]
    while time.monotonic() < latest_s:
        found = await account_store.load(key_id)
        if found is not None and len(found[0].leases) < system.shape.gateways:
            break
        await asyncio.sleep(POLL_S)
    return time.monotonic()


async def cancels(storm: Storm, findings: Findings, count: int) -> None:
    """Check that after disconnects no gateway holds anything of any limit."""
    findings.figures["endings"] = await storm.leave_anywhen("all", count)
    account_store, began_s = AccountStore(storm.system.bus), time.monotonic()
    for name, key_id in storm.system.key_ids.items():
        while await _is_held(account_store, key_id):
            if time.monotonic() - began_s > FREE_LIMIT_S:
                findings.offences.append(f"something of {name} stays reserved: {await account_store.load(key_id)}")
                break
            await asyncio.sleep(POLL_S)
    findings.figures["free_after_s"] = round(time.monotonic() - began_s, 3)


async def _is_held(account_store: AccountStore, key_id: str) -> bool:
    """Report whether a gateway that still renews its lease holds anything."""
    found = await account_store.load(key_id)
    if found is None:
        return False
    live_ms = (time.time() - CLOCK_SLACK_S) * 1000
    return any(lease.held != NOTHING and lease.expires_unix_ms > live_ms for lease in found[0].leases.values())


async def run(
    folder: Path,
    *,
    seed: int,
    seconds: float,
    count: int,
    kill: bool,
    gateways: int = GATEWAYS,
    callers: int = CALLERS,
    limits: Limits = FULL,
    limits_s: float = REACH_LIMIT_S,
) -> Findings:
    """Play everything in an empty folder. ``limits_s``: of ``[gateway.timeouts]``."""
    findings = Findings()
    timeouts = {"limits_s": limits_s}
    shape = replace(SHAPE, gateways=gateways, gateway_timeouts=timeouts, limited=limits.policies())
    async with System(folder, shape) as system:
        storm = Storm(system, limits, seed, callers)
        await storm.wait_until_served()
        await edges(storm, findings, seconds)
        await concurrency(storm, findings, seconds, kill=kill)
        await cancels(storm, findings, count)
        await refusals(storm, findings)
        if not system.log_lines("s ahead of the queue server's"):
            findings.offences.append("a gateway's clock is wrong, and its log does not say so")
        findings.offences += system.log_lines('"critical"')
        findings.offences += system.log_lines("Traceback")
        findings.offences += await _died(system.gateways[1 if kill else 0 :])
    return findings


async def _died(gateways: list[Child]) -> list[str]:
    """Return the exit of each gateway that should be alive."""
    return [
        f"{gateway.name} has ended with exit code {await gateway.wait()}:\n  {gateway.last_lines()}"
        for gateway in gateways
        if not psutil.pid_exists(gateway.pid)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long callers ask at each limit")
    parser.add_argument("--cancels", type=int, default=10_000, help="how many hang up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="limits-") as folder:
        findings = asyncio.run(
            run(
                Path(folder) / "run",
                seed=arguments.seed,
                seconds=arguments.seconds,
                count=arguments.cancels,
                kill=True,
            )
        )
    for offence in findings.offences:
        sys.stderr.write(f"{offence}\n")
    sys.stdout.write(json.dumps({"ok": not findings.offences, **findings.figures}) + "\n")
    return 1 if findings.offences else 0


if __name__ == "__main__":
    sys.exit(main())
