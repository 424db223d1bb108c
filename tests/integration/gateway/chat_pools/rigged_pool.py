"""A worker before a rigged upstream server."""

from typing import Any

from pool_worker.settings import OpenAIChatSettings, WorkerSettings
from tests.conformance.upstream_rig import UpstreamRig
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest


def rigged_worker(gateway: GatewayUnderTest, rig: UpstreamRig, **engine: Any) -> WorkerSettings:
    known = {"kind": "openai_chat", "profile": "openai", "url": rig.url, "model": "rigged", "max_model_len": 1_000_000}
    return WorkerSettings(
        nats_urls=gateway.settings.nats_urls,
        engine=OpenAIChatSettings.model_validate({**known, **engine}),
        models=(MODEL,),
        worker_id="rigged",
        pool="rigged",
        provider="openai",
        tier="spot",
    )
