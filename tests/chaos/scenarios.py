"""The scenarios: which faults, how often, on how many of what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos import upstream_faults
from tests.chaos.mix import Question
from tests.chaos.plays import played_questions
from tests.chaos.servers import ServerSpec
from tests.chaos.system import MODEL, EngineKind, Shape
from tests.player.system import playing_worker


@dataclass(frozen=True)
class Scenario:
    """One kind of bad day. ``weights`` says how likely each fault is."""

    about: str
    weights: dict[str, int]
    faults: int  # by default
    every_s: float  # mean time from one fault's end to the next
    shape: Shape = field(default_factory=Shape)
    callers: int = 16
    answer_tokens: tuple[int, int] = (30, 90)  # from and to
    gap_limits_ms: Mapping[str, Mapping[float, float]] = field(default_factory=dict)  # by kind of fault and percentile
    surfaces: bool = True  # some questions are Responses and Messages
    background: bool = False  # all questions are streamed responses in the background
    in_turn: bool = False  # the kinds of fault, instead of at random
    # Instead of the mix: seed, how many, model, the run's folder.
    asks: Callable[[int, int, str, Path], list[Question]] | None = None
    rescued_per_fault: float = 0.0  # streams of each kind of question, at least

    @property
    def needs_real_servers(self) -> bool:
        """True if vLLM or llama.cpp must be installed for it."""
        return any(spec.real for spec in self.shape.servers)


VLLM_A, VLLM_B = ServerSpec("vllm-a", "vllm"), ServerSpec("vllm-b", "vllm")
LLAMACPP_A, LLAMACPP_B = ServerSpec("llamacpp-a", "llamacpp"), ServerSpec("llamacpp-b", "llamacpp")
UPSTREAMS = (
    ServerSpec(
        upstream_faults.MISBEHAVING,
        "vllm",
        False,
        "spot",
        {"silence_s": upstream_faults.SILENCE_S, "max_sequences": 64},
    ),
    ServerSpec(upstream_faults.HEALTHY, "llamacpp", real=False, settings={"max_sequences": 64}),
)

PLAYING = Shape(
    workers=3,  # a kill strikes a third of all streams
    worker_life=playing_worker,
    # Most answers may be as long as the context: each of them needs room for that.
    worker_settings={"engine": {"kind": "scripted", "inter_token_s": 0.015, "max_kv_tokens": 10**7}},
)

SCENARIOS = {
    "kill": Scenario(
        "SIGKILL a worker in mid-stream", {"kill": 1}, 1000, 0.25, gap_limits_ms={"kill": {50: 150, 99: 2000}}
    ),
    "surfaces": Scenario(
        "SIGKILL a worker in the middle of tool calls, JSON, several choices, Responses and Messages",
        {"kill": 1},
        200,
        2.5,  # time for enough new streams
        PLAYING,
        callers=48,
        asks=played_questions,
        rescued_per_fault=1.0,
    ),
    "freeze": Scenario(
        "SIGSTOP a worker for seconds, then SIGCONT", {"freeze": 1}, 20, 0.5, gap_limits_ms={"freeze": {100: 5000}}
    ),
    "drain": Scenario(
        "SIGTERM a worker: hand back with state", {"drain": 1}, 100, 0.3, gap_limits_ms={"drain": {99: 1000}}
    ),
    "cut": Scenario("break or silence a worker's connection", {"cut": 2, "silence": 1}, 40, 0.5, Shape(proxied=True)),
    "slow": Scenario("a worker that is 20 times slower", {"slow": 1}, 10, 0.5),
    "poison-jobs": Scenario("jobs that kill every worker", {"poison": 1}, 10, 1.0),
    "nats": Scenario("SIGKILL and restart the queue server", {"nats": 1}, 10, 3.0, callers=200),
    "cluster": Scenario("SIGKILL the leader of three", {"cluster": 1}, 5, 5.0, Shape(cluster=True)),
    "ledger": Scenario("SIGKILL the ledger writer", {"ledger": 1}, 10, 1.0),
    "sql": Scenario("stop the database", {"sql": 1}, 5, 1.0, Shape(postgres=True)),
    "gateway": Scenario("SIGKILL one of two gateways", {"gateway": 1}, 10, 2.0, Shape(gateways=2)),
    "background": Scenario(
        "SIGKILL and freeze gateways, and SIGKILL workers, while responses are made in the background",
        {"gateway": 3, "kill": 3, "frozen": 1},
        60,
        1.0,
        Shape(gateways=2, responses={"take_over_s": 0.5, "silence_s": 3.0}),
        background=True,
    ),
    "haproxy": Scenario(
        "the queue away for long, gateways restarted and killed: the load balancer fails nobody",
        {"outage": 2, "restart": 2, "gateway": 1},
        10,
        2.0,
        # Gateways leave as they do by default; their streams last for some seconds.
        Shape(gateways=2, gateway_timeouts={"leave_s": 5.0, "shutdown_s": 30.0}),
    ),
    "gateway-frozen": Scenario(
        "SIGSTOP one of two gateways for seconds, then SIGCONT", {"frozen": 1}, 20, 1.0, Shape(gateways=2)
    ),
    "partition": Scenario(
        "a gateway that hears, or says, nothing any more, or neither, or all of them",
        {"deaf": 1, "mute": 1, "silent": 1, "all_silent": 1},
        20,
        4.0,  # streams recover in between
        Shape(gateways=2, gateways_proxied=True),
    ),
    "upgrade": Scenario(
        "restart everything, in any order, with an older release's code and database, and again with this one's",
        {"upgrade": 1},
        6,
        1.0,
        Shape(gateways=2, gateway_timeouts={"leave_s": 5.0, "shutdown_s": 30.0}, older=True),
    ),
    "credentials": Scenario(
        "change all credentials at the queue server, which ends all connections",
        {"credentials": 1},
        10,
        3.0,
        Shape(gateways=2, credentials=True),
        callers=100,
        answer_tokens=(4, 14),  # short ones: the change is to be met by many requests, not by long streams
    ),
    "skew": Scenario(
        "one of two gateways has a clock 10 s ahead, the other one 10 s behind, while workers and gateways are lost",
        {"kill": 6, "drain": 3, "gateway": 1},
        50,
        0.5,
        Shape(gateways=2, clocks_ahead_s=(10.0, -10.0)),
    ),
    "host": Scenario("SIGKILL a gateway and half of the workers at once", {"host": 1}, 20, 2.0, Shape(gateways=2)),
    "power": Scenario("SIGKILL everything at once", {"power": 1}, 50, 2.0, Shape(gateways=2, postgres=True)),
    "disk-full": Scenario("no room on the queue server's disk for seconds", {"disk_full": 1}, 10, 3.0),
    "mix": Scenario(
        "all of it at random",
        {"kill": 10, "drain": 4, "cut": 2, "freeze": 1, "silence": 1, "slow": 1, "nats": 1, "ledger": 1, "gateway": 1},
        100,
        0.5,
        Shape(gateways=2, proxied=True),
    ),
    "upstream": Scenario(
        "an inference server does everything wrong, beside one that does not",
        dict.fromkeys(map(upstream_faults.kind_of, upstream_faults.WRONGS), 1),
        200,
        0.1,
        Shape(workers=0, servers=UPSTREAMS),
        in_turn=True,
    ),
    "swap": Scenario(
        "a pool beside a server is replaced under load by one beside a server of another make, and back",
        {"swap": 1},
        5,
        0.5,
        Shape(
            workers=0,
            servers=(ServerSpec("old", "vllm", real=False), ServerSpec("new", "llamacpp", real=False, side_cars=2)),
            standing_by="new",
        ),
        callers=6,
    ),
    "kill-vllm": Scenario(
        "SIGKILL a real vLLM in mid-stream, beside another and our engine",
        {"kill_vllm": 1},
        50,
        1.0,
        Shape("spillway", workers=1, servers=(VLLM_A, VLLM_B)),
        callers=6,
    ),
    "kill-llamacpp": Scenario(
        "SIGKILL a real llama.cpp in mid-stream, beside another and our engine",
        {"kill_llamacpp": 1},
        20,
        1.0,
        Shape("spillway", workers=1, servers=(LLAMACPP_A, LLAMACPP_B)),
        callers=6,
    ),
    "between-engines": Scenario(
        "SIGKILL a real vLLM and a real llama.cpp in turn: answers move from one to the other and back",
        {"kill_vllm": 1, "kill_llamacpp": 1},
        20,
        1.0,
        Shape(workers=0, servers=(VLLM_A, LLAMACPP_A)),
        callers=4,
        in_turn=True,
    ),
    "live-swap": Scenario(
        "a real vLLM is drained and removed under load, our engine added, one worker killed; then all of it back",
        {"swap": 1},
        5,
        1.0,
        Shape("spillway", workers=2, servers=(VLLM_A,), standing_by=MODEL),
        callers=4,
    ),
}

REAL_CALLERS = 6
REAL_EVERY_S = 1.0


def for_engine(scenario: Scenario, engine: EngineKind) -> Scenario:
    """The scenario with that engine: a real one shares few cores among all workers, and takes seconds to load."""
    if scenario.shape.servers or scenario.asks:
        return scenario  # its engines are what it is about
    shape = replace(scenario.shape, engine=engine)
    if engine == "scripted":
        return replace(scenario, shape=shape)
    callers, every_s = min(scenario.callers, REAL_CALLERS), max(scenario.every_s, REAL_EVERY_S)
    return replace(scenario, shape=shape, callers=callers, every_s=every_s)
