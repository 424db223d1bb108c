"""NaN, infinity, and 1e400 are not JSON: other routes refuse them by field.

Inference routes: tests/unit/gateway/api/test_numbers.py.
"""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from db.accounts.principal import ADMIN, INFERENCE
from tests.integration.gateway.conftest import Share
from tests.unit.gateway.api.test_numbers import NUMBERS
from tests.waiting import HANGS_S

BATCH = '{"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "junk": {"x": ?}}'
PARAMS = '{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "junk": ?}'
REFUSED = {
    "/v1/batches": (BATCH, ("'junk.x'", '"param":"junk.x"')),
    "/v1/messages/batches": (f'{{"requests": [{{"custom_id": "a", "params": {PARAMS}}}]}}', ()),
    "/admin/v1/teams": ('{"name": "blue", "weight": ?}', ("'weight'",)),
    "/admin/v1/keys": ('{"name": "blue", "weight": ?}', ("'weight'",)),
}


@pytest_asyncio.fixture(loop_scope="module")
async def client(share_gateway: Share) -> AsyncIterator[httpx.AsyncClient]:
    gateway = await share_gateway(console={})
    _, token = await gateway.make_key(scopes=(ADMIN, INFERENCE))
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        yield client


@pytest.mark.parametrize("path", REFUSED)
async def test_hostile_parameters_are_refused_by_name(client: httpx.AsyncClient, path: str) -> None:
    body, named = REFUSED[path]
    for number in NUMBERS:
        answer = await client.post(path, content=body.replace("?", number))
        assert answer.status_code == 400
        assert all(name in answer.text for name in named)
