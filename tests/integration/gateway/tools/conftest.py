"""A gateway whose model has the chat template given."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.settings import ModelSettings
from protocol import artifacts
from protocol.bus import Bus
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start, card, has_context_length
from tests.integration.gateway.tools.calls import StartModel
from tests.small_tokenizer import byte_tokenizer_json
from tests.waiting import until


@pytest.fixture
def start_model(start_gateway: Start, bus: Bus) -> StartModel:
    """A gateway whose model has the chat template given."""

    async def start(template: str, *, tool_template: str | None = None, **settings: Any) -> GatewayUnderTest:
        models = {MODEL: ModelSettings(aliases=("short",), **settings)}
        gateway = await start_gateway(with_card=False, models=models)
        its_card = replace(card(), chat_template=template, context_length=4096, tool_template=tool_template)
        await artifacts.publish_model_card(bus, its_card, byte_tokenizer_json())
        client = gateway.client()
        await until(lambda: has_context_length(client))
        return gateway

    return start
