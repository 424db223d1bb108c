"""GET /docs in a real Chromium: chat comes first, and a request with a key is answered there."""

import json

from tests.acceptance.dashboard.conftest import Visit
from tests.acceptance.system import System

CHAT = "#operations-generation-post_v1_chat_completions"
KEYS = "#operations-keys-list_keys_admin_v1_keys_get"


def test_a_chat_is_tried_with_a_key(visit: Visit, system: System) -> None:
    page = visit.page
    visit.go("/docs")
    first = page.locator(".opblock-tag-section").first
    assert first.locator(".opblock-tag").get_attribute("data-tag") == "generation"
    assert first.locator(".opblock-summary-path").first.inner_text() == "/v1/chat/completions"

    page.click("button.authorize")
    page.fill(".auth-container input", system.api_key)
    page.click(".auth-container button.authorize")
    page.click(".auth-container button.btn-done")

    chat = page.locator(CHAT)
    chat.locator(".opblock-summary-control").click()
    chat.locator("button.try-out__btn").click()
    ask = {"model": "scripted", "messages": [{"role": "user", "content": "[[tokens=5]] hello"}]}
    chat.locator("textarea.body-param__text").fill(json.dumps(ask))
    chat.locator("button.execute").click()
    answer = chat.locator(".live-responses-table .response")
    assert answer.locator(".response-col_status").inner_text().startswith("200")
    assert '"chat.completion"' in answer.locator(".highlight-code").first.inner_text()


def test_the_admin_api_has_schemas(visit: Visit) -> None:
    visit.go("/docs")
    keys = visit.page.locator(KEYS)
    keys.locator(".opblock-summary-control").click()
    example = keys.locator(".response").first.locator(".highlight-code").inner_text()
    assert '"budget_usd"' in example
