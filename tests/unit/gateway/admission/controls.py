"""Admission control without a bus: tests pass it the data of workers and streams."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from db.accounts.principal import Principal
from gateway.admission.control import AdmissionControl, Ticket
from gateway.admission.registry import WorkerRegistry
from gateway.request.request import Admission, Arrival, Prompt
from gateway.settings import GatewaySettings
from protocol.job import PROTOCOL_VERSION, Heartbeat, Sampling


def gateway_settings(model: str = "m", **rest: Any) -> GatewaySettings:
    return GatewaySettings.model_validate(
        {
            "gateway_id": "g",
            "nats_urls": (),
            "database_url": "",
            "data_dir": Path(),
            "key_pepper": SecretStr("p"),
            "models": {model: {}},
            **rest,
        }
    )


def control(model: str = "m", **rest: Any) -> AdmissionControl:
    bus: Any = None
    return AdmissionControl(bus, gateway_settings(model, **rest), WorkerRegistry(bus))


def principal(tenant: str = "k", key_name: str = "k") -> Principal:
    """Return a key of the team ``tenant``."""
    return Principal("k", key_name, tenant, tenant, "o")


ARRIVAL_FIELDS = {"received_s", "received_unix_ms", "queue_wait_s", "deadline_s"}
PROMPT_FIELDS = {"stream", "token_ids", "tokens", "param", "sampling", "pooling", "conversation"}


def admission(
    request_id: str = "req_1", *, tenant: str = "k", key_name: str = "k", trusted: bool = False, **rest: Any
) -> Admission:
    """Return an admission. ``rest``: fields of the admission, its arrival or its prompt."""
    arrival: dict[str, Any] = {"received_s": 0.0, "received_unix_ms": 0, "queue_wait_s": 600.0}
    prompt: dict[str, Any] = {
        "token_ids": b"\x01\x00\x00\x00",
        "tokens": 1,
        "param": "prompt",
        "sampling": Sampling(max_tokens=100),
        "stream": True,
    }
    fields: dict[str, Any] = {"endpoint": "completions", "model": "m", "admitted_s": 0.0}
    for name, value in rest.items():
        (arrival if name in ARRIVAL_FIELDS else prompt if name in PROMPT_FIELDS else fields)[name] = value
    who = principal(tenant, key_name)
    if trusted:
        who = replace(who, key_policy=replace(who.key_policy, trusted_only=True))
    return Admission(arrival=Arrival(request_id, **arrival), prompt=Prompt(**prompt), principal=who, **fields)


def ticket_of(entering: Admission) -> Ticket:
    trusted = {entering.model} if entering.trusted else set[str]()
    return control(entering.model, trusted=trusted).enter(entering)


def beat(worker_id: str = "w", *, free: int = 0, running: int = 0, jobs_taken: int = 0, **rest: Any) -> Heartbeat:
    fields: dict[str, Any] = {
        "pool": "p",
        "provider": "p",
        "region": "r",
        "tier": "spot",
        "engine": "scripted",
        "models": ("m",),
        "usd_per_hour": 0.0,
        "max_sequences": free + running,
        "max_kv_tokens": 1,
        "free_sequences": free,
        "free_kv_tokens": 1,
        "running": running,
        "started_unix_ms": 0,
        "sent_unix_ms": 0,
        "jobs_taken": jobs_taken,
        **rest,
    }
    return Heartbeat(v=PROTOCOL_VERSION, worker_id=worker_id, **fields)
