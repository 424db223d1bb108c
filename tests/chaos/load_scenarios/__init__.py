"""Loads instead of faults: spikes, shares, tiers, callers who leave. Run as the other scenarios are.

The promises that all scenarios share hold here too; each has figures and bounds of its own besides. Callers, gateway,
queue server and workers share the machine's cores, so the engines' speeds are chosen such that these are mostly idle:
otherwise the machine would be measured (``machine_busy_percent`` says how busy it was). Run nothing else meanwhile.

    plan.py     what a load scenario is       callers.py  the open loop, and every answer judged
    spike.py    too much, and nobody there    shares.py   tenants, weights, batch
    tiers.py    cheap pools before dear ones  disconnect.py  callers who hang up
    sql_away.py SQL stopped, frozen, locked  hostile.py  one against all others
    overflow.py  a hosted API beside ours     hosted_api.py  the API, and its bills
    fleet.py    pools of the controller's size   provider.py  a whole provider gone
    regions.py  workers behind a leaf node   batch_kills.py  a batch of lines under kills
    batch_beside.py  and beside others      poison.py  what nobody can read or write
    upstreams.py  a server that does everything wrong
"""

from tests.chaos.load_scenarios import batch_kills, poison, shares, spike, sql_away
from tests.chaos.load_scenarios.batch_beside import batch_beside
from tests.chaos.load_scenarios.disconnect import DISCONNECT_SHAPE, disconnect
from tests.chaos.load_scenarios.fleet import SPOT_SHAPE, STEPS_SHAPE, spot_market, steps
from tests.chaos.load_scenarios.hostile import HOSTILE_SHAPE, hostile
from tests.chaos.load_scenarios.overflow import OVERFLOW_SHAPE, overflow
from tests.chaos.load_scenarios.plan import LoadScenario
from tests.chaos.load_scenarios.provider import PROVIDER_SHAPE, provider
from tests.chaos.load_scenarios.regions import REGIONS_SHAPE, regions
from tests.chaos.load_scenarios.shares import FAIR_SHAPE, WEIGHTS_SHAPE
from tests.chaos.load_scenarios.spike import NOBODY_SHAPE, SPIKE_SHAPE
from tests.chaos.load_scenarios.tiers import TIERS_SHAPE, tiers
from tests.chaos.load_scenarios.upstreams import UPSTREAMS_SHAPE, upstreams
from tests.chaos.system import Shape

LOAD_SCENARIOS = {
    "spike": LoadScenario("ten times the capacity", SPIKE_SHAPE, spike.spike, 30),
    "zero-workers": LoadScenario("no worker at all for a while", NOBODY_SHAPE, spike.zero_workers, 60, 120),
    "nats-idle": LoadScenario("the queue server dies while nothing runs", Shape(workers=1), spike.nats_idle, 1, 10),
    "fair": LoadScenario("two tenants of equal weight, one asks ten times as much", FAIR_SHAPE, shares.fair, 20),
    "weights": LoadScenario("two tenants of weights 3 and 1", WEIGHTS_SHAPE, shares.weights, 20),
    "backlogs": LoadScenario(
        "two tenants behind full engines, all of one before the first of the other", FAIR_SHAPE, shares.backlogs, 0, 36
    ),
    "light-tenant": LoadScenario("one tenant's spike beside another's few", FAIR_SHAPE, shares.light_tenant, 40),
    "batch": LoadScenario("batch jobs fill every pool", FAIR_SHAPE, shares.batch, 40),
    "batch-beside": LoadScenario("a batch of lines fills every pool", FAIR_SHAPE, batch_beside, 40),
    "batch-kills": LoadScenario(
        "a batch of lines over two gateways; workers, gateways, queue, all of it killed",
        batch_kills.SHAPE,
        batch_kills.play(batch_kills.KILLS),
        0,
        10_000,
    ),
    "tiers": LoadScenario("a cheap pool dies and comes back", TIERS_SHAPE, tiers, 10, 5),
    "overflow": LoadScenario("our workers full, gone and back beside a hosted API", OVERFLOW_SHAPE, overflow, 10, 3),
    "sql-stopped": LoadScenario(
        "200 requests/s, and no PostgreSQL for 60 s", sql_away.POSTGRES_SHAPE, sql_away.play(sql_away.stopped), 60, 200
    ),
    "sql-frozen": LoadScenario(
        "the same, and it holds its connections", sql_away.POSTGRES_SHAPE, sql_away.play(sql_away.frozen), 60, 200
    ),
    "sql-locked": LoadScenario(
        "the same with SQLite, and somebody locks it", sql_away.SQLITE_SHAPE, sql_away.play(sql_away.locked), 60, 200
    ),
    "hostile": LoadScenario("whatever one caller can try, beside one who only works", HOSTILE_SHAPE, hostile, 60),
    "poison": LoadScenario(
        "items that nobody can read, with restarts, beside one who only works",
        poison.SHAPE,
        poison.poison,
        150,
    ),
    "fleet-steps": LoadScenario("eight times the load, then none: a pool of the controller's", STEPS_SHAPE, steps, 30),
    "fleet-spot": LoadScenario(
        "a day of a spot market in 432 s, at EC2 in a box; the controller killed", SPOT_SHAPE, spot_market, 432
    ),
    "provider": LoadScenario("a whole provider's network is lost, and comes back", PROVIDER_SHAPE, provider, 8, 8),
    "upstreams": LoadScenario(
        "a server that does everything wrong, beside a healthy pool", UPSTREAMS_SHAPE, upstreams, 60
    ),
    "regions": LoadScenario("two regions, their workers and the wire between them", REGIONS_SHAPE, regions, 8, 3),
    "disconnect": LoadScenario("callers hang up at any moment", DISCONNECT_SHAPE, disconnect, 0, 1000),
}
