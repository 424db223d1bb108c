"""The running system that all files of this folder share (tests/conftest.py gives them to one process)."""

from collections.abc import Iterator

import pytest

from db.accounts.principal import Policy
from tests.clients.stumbling import StumblingWay
from tests.player.system import PlayedSystem, run_played

LIMITED = {
    "one at a time": Policy(max_concurrent=1),
    "spent": Policy(budget_nano_usd=1, budget_period="total"),
}


@pytest.fixture(scope="package")
def spillway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedSystem]:
    with run_played(tmp_path_factory.mktemp("clients") / "run", workers=1, limited=LIMITED) as played:
        yield played


@pytest.fixture(scope="package")
def stumbling(spillway: PlayedSystem) -> Iterator[StumblingWay]:
    way = StumblingWay(spillway.system.port)
    spillway.run(way.start())
    yield way
    spillway.run(way.stop())
