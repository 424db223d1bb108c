"""A gateway whose model has a given chat template."""

from typing import Any

import pytest

from gateway.settings import ModelSettings
from tests.unit.gateway.api.tools.calls import StartModel
from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import MODEL, LocalGateway, card


@pytest.fixture
def start_model(start_local: Start) -> StartModel:
    """Return a function that starts a gateway whose model has the given chat template."""

    async def start(template: str, *, tool_template: str | None = None, **settings: Any) -> LocalGateway:
        models = {MODEL: ModelSettings(aliases=("short",), **settings)}
        its_card = card(chat_template=template, context_length=4096, tool_template=tool_template)
        return await start_local(model_card=its_card, models=models)

    return start
