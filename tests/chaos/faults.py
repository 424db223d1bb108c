"""Every fault, one function each. To add one: write it here under ``@fault``, and name it in ``scenarios.py``.
Those of inference servers are in ``server_faults`` and ``upstream_faults``.

A fault picks its victim, writes down the strike (``chaos.strike``) at the moment it strikes, and returns when what it
broke has been mended. The farm replaces dead workers by itself.
"""

import asyncio
import itertools
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable

from spillway.children import Child
from tests.chaos.mix import Question
from tests.chaos.rescues import rescues, was_in_json
from tests.chaos.strikes import VICTIM_LIMIT_S, Chaos, Strike, fault
from tests.chaos.system import MODEL
from tests.nats_server import NatsServer
from tests.shipped import ShippedNats, check_nats_health

FREEZE_S = (2.0, 6.0)
SILENCE_S = (2.0, 6.0)
SLOW_S = (1.0, 3.0)
SLOW_FACTOR = 20
SERVER_AWAY_S = (0.2, 2.0)
SQL_AWAY_S = (1.0, 4.0)
OUTAGE_S = (6.0, 12.0)
LONG_FREEZE_S = (2.0, 9.0)  # the load balancer looks elsewhere after some 6, the queue server gives up after 10
PARTITION_S = (2.0, 9.0)
BALANCED_LIMIT_S = 30.0
DISK_FULL_S = (3.0, 8.0)
HEALTH_PERIOD_S = 5.0  # docker-compose.yml
MOST_KILLS = 40  # until each kind of stream was rescued
HOPES = 2  # struck streams of a kind whose ends are awaited before another is struck: some had no more to say
POISON = "[[exit after=0]]"


@fault
async def kill(chaos: Chaos) -> None:
    """SIGKILL a worker in mid-stream."""
    victim = await chaos.victim()
    chaos.strike("kill", victim)
    victim.send(signal.SIGKILL)


@fault
async def kill_each_kind(chaos: Chaos) -> None:
    """SIGKILL workers in mid-stream until streams of every kind of question were rescued, one of them in its JSON."""
    kinds = {question.kind for question in chaos.asked}
    while len(chaos.strikes) < MOST_KILLS:
        found = list(rescues(chaos.strikes, chaos.load.calls, chaos.system.watcher))
        lacking = kinds - {call.question.kind for _, call in found}
        if not lacking and any(itertools.starmap(was_in_json, found)):
            return
        struck = {request_id for strike in chaos.strikes for request_id in strike.streams}
        hopes = Counter(call.question.kind for call in chaos.load.open_calls() if call.request_id in struck)
        wanted = {kind for kind in lacking or kinds if hopes[kind] < HOPES}
        if not wanted:
            await asyncio.sleep(0.02)
            continue
        victim = await chaos.victim(_is_new_answer_to(chaos, wanted, struck))
        chaos.strike("kill", victim)
        victim.send(signal.SIGKILL)
        while victim.worker_id in chaos.system.farm.live:
            await asyncio.sleep(0.02)


def _is_new_answer_to(chaos: Chaos, kinds: set[str], struck: set[str]) -> Callable[[str], bool]:
    """Whether a stream is of such a kind, and no fault has struck it: its attempts have a limit."""
    return lambda request_id: (
        request_id not in struck
        and any(call.request_id == request_id and call.question.kind in kinds for call in chaos.load.open_calls())
    )


@fault
async def freeze(chaos: Chaos) -> None:
    """SIGSTOP a worker for some seconds: its connection lives, and it comes back not knowing that it was away."""
    victim = await chaos.victim()
    strike = chaos.strike("freeze", victim)
    victim.send(signal.SIGSTOP)
    await chaos.pause(FREEZE_S)
    victim.send(signal.SIGCONT)
    strike.mended_s = time.monotonic()


@fault
async def drain(chaos: Chaos) -> None:
    """SIGTERM a worker: it hands back what does not fit its notice."""
    victim = await chaos.victim()
    chaos.strike("drain", victim)
    victim.send(signal.SIGTERM)


@fault
async def cut(chaos: Chaos) -> None:
    """Reset a worker's connection; it may reconnect at once."""
    victim = await chaos.victim()
    chaos.strike("cut", victim).may_stay = True
    chaos.system.proxies[victim.slot].cut()


@fault
async def silence(chaos: Chaos) -> None:
    """Silently block a worker's connection for some seconds."""
    victim = await chaos.victim()
    strike = chaos.strike("silence", victim)
    strike.may_stay = True
    proxy = chaos.system.proxies[victim.slot]
    proxy.silence()
    await chaos.pause(SILENCE_S)
    proxy.heal()
    strike.mended_s = time.monotonic()


@fault
async def slow(chaos: Chaos) -> None:
    """Have a worker that is many times slower than its peers, and then sent away: slow is no fault by itself."""
    system = chaos.system
    engine = system.farm.settings.engine.model_copy(update={"inter_token_s": system.shape.inter_token_s * SLOW_FACTOR})
    laggard = await system.farm.spawn(system.shape.workers, {"engine": engine}, replace=False)
    await chaos.pause(SLOW_S)
    chaos.strike("slow", laggard)
    laggard.send(signal.SIGTERM)
    while laggard.worker_id in system.farm.live:
        await asyncio.sleep(0.02)


@fault
async def poison(chaos: Chaos) -> None:
    """Ask what kills every worker that tries it: it must end in an error and a dead letter, and hurt nobody else."""
    messages = [{"role": "user", "content": f"poison {len(chaos.poisoned)} {POISON}"}]
    question = Question(-1 - len(chaos.poisoned), "/v1/chat/completions", {"model": MODEL, "messages": messages})
    chaos.strike("poison")
    chaos.poisoned.append(asyncio.create_task(chaos.load.ask(question)))
    await asyncio.wait(chaos.poisoned[-1:])


@fault
async def nats(chaos: Chaos) -> None:
    """SIGKILL the only queue server, and start it again: its memory streams are gone."""
    await chaos.victim()
    await _kill_server(chaos, "nats", chaos.system.queue_servers[0], SERVER_AWAY_S)


@fault
async def cluster(chaos: Chaos) -> None:
    """SIGKILL the server that leads the job stream, and bring it back."""
    system = chaos.system
    assert system.cluster is not None
    await chaos.victim()
    while (leader := await system.cluster.leader_of(system.bus, "RQ")) is None:
        await asyncio.sleep(0.05)
    await _kill_server(chaos, "cluster", system.queue_servers[leader], SERVER_AWAY_S)


async def _kill_server(chaos: Chaos, kind: str, server: NatsServer, away_s: tuple[float, float]) -> None:
    strike = chaos.strike(kind)
    server.kill()
    await chaos.pause(away_s)
    await asyncio.to_thread(server.start)
    strike.mended_s = time.monotonic()


@fault
async def ledger(chaos: Chaos) -> None:
    """SIGKILL the ledger writer, and start it again later."""
    await _kill_child(chaos, chaos.system.ledger, chaos.strike("ledger"), SQL_AWAY_S)


@fault
async def sql(chaos: Chaos) -> None:
    """Stop PostgreSQL under load, and start it again later."""
    postgres = chaos.system.postgres
    assert postgres is not None
    strike = chaos.strike("sql")
    await asyncio.to_thread(postgres.stop)
    await chaos.pause(SQL_AWAY_S)
    await asyncio.to_thread(postgres.start)
    strike.mended_s = time.monotonic()


@fault
async def gateway(chaos: Chaos) -> None:
    """SIGKILL one of several gateways: its callers ask again, the others' callers notice nothing."""
    system = chaos.system
    await system.wait_until_balanced(BALANCED_LIMIT_S)
    killed = await chaos.busy_gateway()
    strike = chaos.strike("gateway", of=lambda request_id: not system.is_at(request_id, killed))
    await _kill_child(chaos, killed, strike, SERVER_AWAY_S)


@fault
async def outage(chaos: Chaos) -> None:
    """SIGKILL the only queue server for longer than it takes the load balancer to see that no gateway has it."""
    await chaos.victim()
    await _kill_server(chaos, "outage", chaos.system.queue_servers[0], OUTAGE_S)


@fault
async def restart(chaos: Chaos) -> None:
    """SIGTERM one of several gateways, and start it again: nobody notices."""
    system = chaos.system
    await system.wait_until_balanced(BALANCED_LIMIT_S)
    await chaos.victim()
    strike = chaos.strike("restart")
    leaving = chaos.rng.choice(system.gateways)
    await leaving.stop()
    await system.restart(leaving)
    strike.mended_s = time.monotonic()


@fault
async def upgrade(chaos: Chaos) -> None:
    """Restart everything, one after the other, with the older release's code; then with this one's: in any two orders.

    The schema comes before this one's code.
    """
    strike = chaos.strike("upgrade")
    for environment in (chaos.system.older_code, {}):
        if not environment:
            await chaos.system.upgrade_schema()
        for kind in chaos.rng.sample(sorted(_CHANGES), len(_CHANGES)):
            await _CHANGES[kind](chaos, environment)
    strike.mended_s = time.monotonic()


async def _change_gateways(chaos: Chaos, environment: dict[str, str]) -> None:
    for gateway in chaos.system.gateways:
        await chaos.system.wait_until_balanced(BALANCED_LIMIT_S)
        await _change(chaos, gateway, environment)


async def _change_ledger(chaos: Chaos, environment: dict[str, str]) -> None:
    await _change(chaos, chaos.system.ledger, environment)


async def _change(chaos: Chaos, child: Child, environment: dict[str, str]) -> None:
    await child.stop()
    child.environment = environment
    await chaos.system.restart(child)


async def _change_workers(chaos: Chaos, environment: dict[str, str]) -> None:
    """The farm's workers run this commit's code; others are processes of their own."""
    system, farm = chaos.system, chaos.system.farm
    if environment:
        for worker in list(farm.live.values()):
            await system.add_worker_process(worker.slot, environment)
            farm.retire(worker)
    else:
        for slot in list(system.worker_processes):
            worker = await farm.spawn(slot)
            async with asyncio.timeout(VICTIM_LIMIT_S):
                while not system.watcher.has_beaten(worker.worker_id):
                    await asyncio.sleep(0.05)
            await system.worker_processes.pop(slot).stop()


_CHANGES = {"gateways": _change_gateways, "ledger": _change_ledger, "workers": _change_workers}


@fault
async def frozen(chaos: Chaos) -> None:
    """SIGSTOP one of several gateways for some seconds: its callers wait, and then have all that they should have."""
    await chaos.victim()
    victim = chaos.rng.choice(chaos.system.gateways)
    strike = chaos.strike("frozen", of=lambda request_id: chaos.system.is_at(request_id, victim))
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        await chaos.pause(LONG_FREEZE_S)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    strike.mended_s = time.monotonic()


@fault
async def deaf(chaos: Chaos) -> None:
    """Block the queue server's messages to one gateway; its own still arrive."""
    await _part_gateways(chaos, "deaf", mute=False)


@fault
async def mute(chaos: Chaos) -> None:
    """Block one gateway's messages to the queue server; it still receives everything."""
    await _part_gateways(chaos, "mute", deaf=False)


@fault
async def silent(chaos: Chaos) -> None:
    """Silently block all messages between one gateway and the queue server."""
    await _part_gateways(chaos, "silent")


@fault
async def all_silent(chaos: Chaos) -> None:
    """Silently block all messages between every gateway and the queue server."""
    await _part_gateways(chaos, "all_silent", everybody=True)


async def _part_gateways(
    chaos: Chaos, kind: str, *, deaf: bool = True, mute: bool = True, everybody: bool = False
) -> None:
    await chaos.victim()
    system = chaos.system
    number = chaos.rng.randrange(len(system.gateways))
    victim, proxies = system.gateways[number], system.gateway_proxies
    strike = chaos.strike(kind, of=lambda request_id: everybody or system.is_at(request_id, victim))
    struck = proxies if everybody else [proxies[number]]
    for proxy in struck:
        proxy.silence(deaf=deaf, mute=mute)
    await chaos.pause(PARTITION_S)
    for proxy in struck:
        proxy.heal()
    strike.mended_s = time.monotonic()


@fault
async def host(chaos: Chaos) -> None:
    """SIGKILL one of two gateways together with half of the workers, as when the machine they share dies."""
    await chaos.victim()
    system = chaos.system
    killed = chaos.rng.choice(system.gateways)
    live = sorted(system.farm.live.values(), key=lambda worker: worker.slot)
    workers = chaos.rng.sample(live, len(live) // 2)
    strike = chaos.strike("host", of=lambda request_id: not system.is_at(request_id, killed))
    await system.kill_at_once([killed], workers)
    await chaos.pause(SERVER_AWAY_S)
    await system.restart(killed)
    strike.mended_s = time.monotonic()


@fault
async def power(chaos: Chaos) -> None:
    """SIGKILL everything at once, queue server and database included, and start it all again."""
    await chaos.victim()
    system = chaos.system
    strike = chaos.strike("power", of=lambda _: False)  # no stream outlives it
    await system.cut_power()
    await chaos.pause(SERVER_AWAY_S)
    await system.restore_power(BALANCED_LIMIT_S)
    strike.mended_s = time.monotonic()


@fault
async def disk_full(chaos: Chaos) -> None:
    """Let no file of the queue server grow for a while, until its health check restarts it.

    A limit on the size of its files does to it what a full disk does, and needs no root.
    """
    await chaos.victim()
    server = chaos.system.queue_servers[0]
    assert isinstance(server, ShippedNats)
    strike = chaos.strike("disk_full")
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    await chaos.pause(DISK_FULL_S)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while not server.has_ended:
        await asyncio.to_thread(check_nats_health, server, server.monitor_port)
        await asyncio.sleep(HEALTH_PERIOD_S)
    await asyncio.to_thread(server.start)
    strike.mended_s = time.monotonic()


@fault
async def credentials(chaos: Chaos) -> None:
    """Make new credentials for everybody, then revoke the old ones: all connections end at once, and come back."""
    signed = chaos.system.signed
    assert signed is not None
    signed.add()
    await chaos.victim()
    strike = chaos.strike("credentials")
    strike.may_stay = True
    await asyncio.to_thread(signed.retire)
    strike.mended_s = time.monotonic()


async def _kill_child(chaos: Chaos, child: Child, strike: Strike, away_s: tuple[float, float]) -> None:
    await chaos.system.kill(child)
    await chaos.pause(away_s)
    await chaos.system.restart(child)
    strike.mended_s = time.monotonic()
