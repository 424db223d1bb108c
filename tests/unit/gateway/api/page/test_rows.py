"""docs/reference/api.md has a row for every SDK parameter, and every row matches the gateway.

If this fails after an SDK upgrade, it lists the new parameters that the page lacks.
"""

import pytest

from tests.tool_templates import THINKING_STYLE
from tests.unit.gateway.api.page import page
from tests.unit.gateway.api.page.rows import STORED, Told, faults
from tests.unit.gateway.api.page.surfaces import SDKS
from tests.unit.gateway.api.pooling.inputs import EMBEDDER, embed, with_card
from tests.unit.gateway.api.tools.calls import says
from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import card


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.path)
def told(request: pytest.FixtureRequest) -> Told:
    return Told(request.param)


def test_every_parameter_has_a_row(told: Told) -> None:
    listed = {name for where, name in told.rows if not where}
    known = {known.name for known in told.walk if not known.where}
    assert sorted(known - listed) == []
    others = [Told(sdk).walk for sdk in SDKS if sdk.section == told.sdk.section]
    assert sorted(listed - {known.name for walk in others for known in walk} - told.sdk.further) == []


def test_values_are_all_listed_where_some_are(told: Told) -> None:
    listed = {where for where, _ in told.rows if where.rpartition(".")[2] in {"type", "role"}}
    found = {(known.where, known.name) for known in told.walk}
    assert sorted({where for where, _ in found if where.endswith((".type", ".role"))} - listed) == []
    assert [one for one in found if one[0] in listed and page.status_of(told.rows, *one) is None] == []


def test_no_row_has_an_unknown_name(told: Told) -> None:
    found = {(known.where, known.name) for sdk in SDKS if sdk.section == told.sdk.section for known in Told(sdk).walk}
    wheres = {where for where, _ in found} | {page.ANYWHERE}
    assert [row for row in told.rows if row[0] and row[0] not in wheres] == []
    rest = [(where, name) for where, name in told.rows if where and name != page.OTHERS and where != page.ANYWHERE]
    assert [row for row in rest if row not in found] == []


async def test_each_row_is_true(told: Told, start_local: Start) -> None:
    if told.sdk.makes_vectors:
        gateway = await start_local(**with_card(EMBEDDER))
        await gateway.add_worker(script=embed)
    else:
        gateway = await start_local(model_card=card(chat_template=THINKING_STYLE, context_length=4096))
        await gateway.add_worker(script=says("x"))
    asked = [known for known in told.known() if known.top not in STORED]
    assert not (found := await faults(gateway.http(), told, asked)), "\n".join(found)
