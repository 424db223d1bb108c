"""A gateway whose model has the chat template given."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.settings import ModelSettings
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, card
from tests.integration.gateway.tools.calls import StartModel


@pytest.fixture
def start_model(share_gateway: Share) -> StartModel:
    """The module's gateway whose model has the chat template given."""

    async def start(template: str, *, tool_template: str | None = None, **settings: Any) -> GatewayUnderTest:
        models = {MODEL: ModelSettings(aliases=("short",), **settings)}
        its_card = replace(card(), chat_template=template, context_length=4096, tool_template=tool_template)
        return await share_gateway(model_card=its_card, models=models)

    return start
