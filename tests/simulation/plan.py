"""The events of a simulation, drawn from its seed alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from db.accounts.principal import Policy
from tests.simulation.callers import Question

# The kinds of faults with their relative frequency.
WEIGHTS = {
    "worker_crash": 4,
    "worker_freeze": 2,
    "worker_slow": 2,
    "worker_drain": 2,
    "engine_death": 2,
    "workers_away": 2,
    "gateway_crash": 3,
    "gateway_freeze": 2,
    "gateway_restart": 2,
    "ledger_crash": 2,
    "sql_away": 2,
    "nats_crash": 3,
    "nats_freeze": 2,
    "kick": 3,
    "partition": 4,
    "noise": 4,
    "host": 3,
    "power": 2,
    "disk_full": 2,
    "skew": 3,
    "long_wait": 2,
}
MEANING = {
    "worker_crash": "SIGKILL of a worker",
    "worker_freeze": "SIGSTOP of a worker, and SIGCONT",
    "worker_slow": "a worker whose steps take twenty times as long",
    "worker_drain": "SIGTERM of a worker",
    "engine_death": "a worker's engine dies",
    "workers_away": "all workers die, and stay away",
    "gateway_crash": "SIGKILL of a gateway",
    "gateway_freeze": "SIGSTOP of a gateway, and SIGCONT",
    "gateway_restart": "SIGTERM of a gateway",
    "ledger_crash": "SIGKILL of the ledger writer",
    "sql_away": "the database refuses everything",
    "nats_crash": "SIGKILL of the queue server: streams in memory are lost",
    "nats_freeze": "SIGSTOP of the queue server, and SIGCONT",
    "kick": "the queue server ends a connection",
    "partition": "a host is deaf, mute or both towards the queue server",
    "noise": "messages are dropped, doubled, late, or overtaken by later ones",
    "host": "a host loses power: all of its processes at once, without a goodbye",
    "power": "everything loses power",
    "disk_full": "the queue server's disk is full for a while, and it is restarted then",
    "skew": "a process's clock is wrong",
    "long_wait": "jobs wait for workers beyond the duplicate window, and connections are lost then",
}
KINDS = tuple(WEIGHTS)
FIRST_AT_S = 2.0
WRONG_BY_S = (-60.0, -10.0, -1.5, 1.5, 10.0, 60.0)


@dataclass(frozen=True)
class Fault:
    kind: str
    at_s: float
    for_s: float
    pick: float  # 0 to 1: selects the target and the variant


@dataclass(frozen=True)
class Plan:
    """The parameters of one simulation."""

    seed: int
    layout: str  # "one" host for everything; "front" for gateways and workers; "apart": one each
    gateways: int
    workers: int
    max_sequences: int
    token_s: float
    policies: dict[str, Policy]
    questions: tuple[Question, ...]
    faults: tuple[Fault, ...]
    skews_s: dict[str, float]  # by process name

    def describe(self) -> list[str]:
        """Return a readable description."""
        shape = f"layout {self.layout}, {self.gateways} gateways, {self.workers} workers of {self.max_sequences} places"
        limits = ", ".join(f"{name}: {_described(policy)}" for name, policy in self.policies.items())
        skews = ", ".join(f"{name} {skew_s:+g} s" for name, skew_s in self.skews_s.items()) or "none"
        lines = [
            f"{shape}, {self.token_s * 1000:.0f} ms a token, {len(self.questions)} requests",
            limits,
            f"skew {skews}",
        ]
        return lines + [f"{one.at_s:8.3f} s  {one.kind} for {one.for_s:.3f} s ({one.pick:.3f})" for one in self.faults]


def _described(policy: Policy) -> str:
    fields = {name: getattr(policy, name) for name in Policy.__dataclass_fields__}
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None) or "no limits"


def plan_of(seed: int, kinds: tuple[str, ...] = KINDS) -> Plan:
    """Draw a simulation with faults of these kinds."""
    rng = random.Random(f"plan {seed}")
    gateways, workers = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 3))
    span_s = rng.uniform(2.0, 15.0)
    keys = {
        "free": Policy(),
        "places": Policy(max_concurrent=rng.choice((1, 2, 3))),
        "rate": Policy(requests_per_minute=rng.choice((2, 4, 6)), tokens_per_minute=rng.choice((None, 300))),
        "money": Policy(budget_nano_usd=rng.choice((60_000, 150_000, 400_000)), budget_period="total"),
    }
    favourite = rng.choice(tuple(keys))
    questions = tuple(
        _question(rng, number, span_s, gateways, rng.choice((favourite, rng.choice(tuple(keys)))))
        for number in range(rng.randint(5, 20))
    )
    asked_s = [question.at_s for question in questions]
    faults, skews_s = _faults(random.Random(f"faults {seed}"), kinds, gateways, workers, asked_s)
    return Plan(
        seed=seed,
        layout=rng.choice(("one", "front", "front", "apart", "apart")),
        gateways=gateways,
        workers=workers,
        max_sequences=rng.choice((1, 2, 4, 8)),
        token_s=rng.uniform(0.02, 0.12),
        policies=keys,
        questions=questions,
        faults=faults,
        skews_s=skews_s,
    )


def _question(rng: random.Random, number: int, span_s: float, gateways: int, key: str) -> Question:
    leaves = rng.uniform(0.05, 4.0) if rng.random() < 0.15 else None
    return Question(
        number=1000 + number,
        at_s=FIRST_AT_S + rng.uniform(0.0, span_s),
        gateway=rng.randrange(gateways),
        key=key,
        streams=rng.random() < 0.7,
        length=rng.choice((1, 5, 20, 40, 80)),
        max_tokens=rng.choice((10, 50, 100)),
        choices=rng.choice((1, 1, 1, 2)),
        prompt_tokens=rng.randint(2, 40),
        deadline_ms=rng.randint(500, 20_000) if rng.random() < 0.1 else None,
        leaves_after_s=leaves,
        is_batch=rng.random() < 0.1,
    )


def _faults(
    rng: random.Random, kinds: tuple[str, ...], gateways: int, workers: int, asked_s: Sequence[float]
) -> tuple[tuple[Fault, ...], dict[str, float]]:
    drawn: list[Fault] = []
    skews_s: dict[str, float] = {}
    weights = [WEIGHTS[kind] for kind in kinds]
    for kind in rng.choices(kinds, weights, k=rng.randint(1, 4)) if kinds else ():
        lasts_s = rng.choice((0.3, 2.0, 8.0)) * rng.uniform(0.5, 1.5)
        fault = Fault(kind, _moment_s(rng, drawn, asked_s), lasts_s, rng.random())
        if kind == "skew":
            names = [*[f"g{n}" for n in range(gateways)] * 2, *[f"w{n}" for n in range(workers)], "ledger", "queue"]
            skews_s[rng.choice(names)] = rng.choice(WRONG_BY_S)
        elif kind == "long_wait":
            away_s = rng.uniform(121.0, 150.0)
            drawn.append(Fault("workers_away", FIRST_AT_S + rng.uniform(0.0, 2.0), away_s + 10.0, fault.pick))
            drawn.append(Fault(rng.choice(("kick", "nats_freeze")), FIRST_AT_S + away_s, 8.0, fault.pick))
        else:
            drawn.append(fault)
    return tuple(sorted(drawn, key=lambda one: one.at_s)), skews_s


def _moment_s(rng: random.Random, drawn: Sequence[Fault], asked_s: Sequence[float]) -> float:
    """Draw the time of a fault: often just after a request, or during another fault."""
    how = rng.random()
    if how < 0.4:
        return rng.choice(asked_s) + rng.choice((0.01, 0.1, 1.0)) * rng.random()
    if how < 0.7 and drawn:
        other = rng.choice(drawn)
        return other.at_s + rng.choice((0.05, 0.5, other.for_s)) * rng.random()
    return FIRST_AT_S + rng.uniform(0.0, 15.0)


def known(names: list[str]) -> tuple[str, ...]:
    """Return fault kinds by name. Raises ValueError."""
    wrong: Any = sorted(set(names) - set(KINDS))
    if wrong:
        raise ValueError(f"unknown faults: {', '.join(wrong)}")
    return tuple(kind for kind in KINDS if kind in names)
