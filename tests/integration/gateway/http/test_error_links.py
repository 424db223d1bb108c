"""Error bodies link to the documentation of their codes, which the gateway itself serves."""

import re
from typing import Any
from unittest.mock import ANY

import anthropic
import httpx
import openai
import pytest

from gateway.error_codes import ABOUT
from tests.integration.gateway.conftest import Share

BODY = {"code": "model_not_found", "type": "invalid_request_error", "param": "model"}
NO_MODEL: dict[str, Any] = {"model": "no-such-model", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("public_url", "start"), [(None, ""), ("https://llm.example.com/", "https://llm.example.com")], ids=["none", "set"]
)
async def test_sdks_keep_the_link_and_the_page_has_its_anchor(
    share_gateway: Share, public_url: str | None, start: str
) -> None:
    gateway = await share_gateway(public_url=public_url)
    link = f"{start}/docs/errors#model_not_found"
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(**NO_MODEL)
        assert (refused.value.code, refused.value.type) == ("model_not_found", "invalid_request_error")
        assert refused.value.body == {**BODY, "doc_url": link, "message": ANY}
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model="no-such-model", input="Hi")
        assert refused.value.body == {**BODY, "doc_url": link, "message": ANY}
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as messages:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await messages.messages.create(**NO_MODEL, max_tokens=1)
        assert unknown.value.type == "not_found_error"
        error = {"type": "not_found_error", "message": ANY, "doc_url": link}
        assert unknown.value.body == {"type": "error", "error": error, "request_id": ANY}
    async with httpx.AsyncClient(base_url=gateway.url) as browser:
        page = await browser.get("/docs/errors")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert re.findall(r'<h3 id="([^"]+)"', page.text) == list(ABOUT)
        assert re.findall(r'(?:src|href)="(?!#|data:,)', page.text) == []  # it loads nothing
