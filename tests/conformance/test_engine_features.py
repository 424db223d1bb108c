"""Each engine behaves as the table of docs/reference/engines.md (``matrix``) says: a field is sent, or refused."""

import dataclasses
from typing import Any

import pytest

from pool_worker.engines.formats.base import done_here
from tests.conformance.driven_engine import Driver, driving, request
from tests.conformance.matrix import FIELDS, GRAMMARS, Column, columns
from tests.conformance.replay import AnyReplay, ReplayOf
from tests.conformance.test_engines import server_settings
from tests.conformance.vllm_replay import VllmReplay

ASKED = {**FIELDS, **GRAMMARS}


async def cell(driver: Driver, replay: AnyReplay, column: Column, name: str) -> str:
    """Send a request with one additional field; return the result."""
    usual: dict[str, Any] = {"max_tokens": 4, "ignore_eos": False, "temperature": 1.0}
    driver.engine.submit(request(f"without {name}", **usual))
    await driver.end_of(f"without {name}")
    asked = {"grammar" if name in GRAMMARS else name: ASKED[name]}
    driver.engine.submit(request(f"with {name}", **{**usual, **asked}))
    (answer,) = await driver.end_of(f"with {name}")
    refusal = driver.refusals.get(f"with {name}")
    if refusal is not None:
        assert refusal.param == ("response_format" if name in GRAMMARS else name)
        assert answer.finish_reason == "error"
        return "no"
    assert answer.finish_reason == "length"
    without, with_it = replay.bodies[-2:]
    needs_the_server = name in (column.known | column.grammars) - done_here(column.answers_in)
    assert needs_the_server == (with_it != without) or name == "stop_token_ids"  # which some servers also get
    return "yes"


@pytest.mark.parametrize("column", columns(), ids=lambda column: column.kind)
async def test_declared_fields_are_sent_and_others_refused_by_name(
    column: Column, tokenizer: str, replay_of: ReplayOf
) -> None:
    replay = replay_of(column.kind)
    replay.token_s = 0.0
    async with driving(server_settings(replay, tokenizer)) as driver:
        observed = {name: await cell(driver, replay, column, name) for name in ASKED}
    assert observed == {name: column.says(name) for name in ASKED}


SALT_FIELDS = {"vllm": "cache_salt", "vllm_inprocess": "cache_salt", "sglang": "extra_key"}


@pytest.mark.parametrize("column", columns(), ids=lambda column: column.kind)
async def test_the_tenants_salt_is_sent_to_a_server_that_takes_one(
    column: Column, tokenizer: str, replay_of: ReplayOf
) -> None:
    replay = replay_of(column.kind)
    replay.token_s = 0.0
    async with driving(server_settings(replay, tokenizer)) as driver:
        for name, salt in (("shared", ""), ("salted", "of the tenant")):
            driver.submit(dataclasses.replace(request(name, max_tokens=2), cache_salt=salt))
            await driver.end_of(name)
    bodies: list[Any] = replay.prompts if isinstance(replay, VllmReplay) else replay.bodies
    shared, salted = bodies[-2:]
    field = SALT_FIELDS.get(column.kind)
    assert column.takes_cache_salt == (field is not None)
    assert salted == (shared if field is None else {**shared, field: "of the tenant"})
