"""Loads instead of faults: spikes, shares, tiers, callers who leave. Run as the other scenarios are.

The promises that all scenarios share hold here too; each has figures and bounds of its own besides. Callers, gateway,
queue server and workers share the machine's cores, so the engines' speeds are chosen such that these are mostly idle:
otherwise the machine would be measured (``machine_busy_percent`` says how busy it was). Run nothing else meanwhile.

    plan.py     what a load scenario is       callers.py  the open loop, and every answer judged
    spike.py    too much, and nobody there    shares.py   tenants, weights, batch
    tiers.py    cheap pools before dear ones  disconnect.py  callers who hang up
"""

from tests.chaos.load_scenarios import shares, spike
from tests.chaos.load_scenarios.disconnect import disconnect
from tests.chaos.load_scenarios.plan import LoadScenario
from tests.chaos.load_scenarios.tiers import tiers

LOAD_SCENARIOS = {
    "spike": LoadScenario("ten times the capacity", spike.spike, seconds=30),
    "zero-workers": LoadScenario("no worker at all for a while", spike.zero_workers, seconds=60, count=120),
    "nats-idle": LoadScenario("the queue server dies while nothing runs", spike.nats_idle, seconds=1, count=10),
    "fair": LoadScenario("two tenants of equal weight, one asks ten times as much", shares.fair, seconds=20),
    "weights": LoadScenario("two tenants of weights 3 and 1", shares.weights, seconds=20),
    "light-tenant": LoadScenario("one tenant's spike beside another's few", shares.light_tenant, seconds=40),
    "batch": LoadScenario("batch jobs fill every pool", shares.batch, seconds=40),
    "tiers": LoadScenario("a cheap pool dies and comes back", tiers, seconds=10, count=5),
    "disconnect": LoadScenario("callers hang up at any moment", disconnect, seconds=0, count=1000),
}
