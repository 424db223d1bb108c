"""Tool calls over the wire. Formats and APIs are tested in tests/unit/gateway/api/tools."""

from typing import Any

from msgspec.structs import replace

from tests.integration.gateway.conftest import MODEL, Share, card
from tests.integration.gateway.scripted_worker import Attempt
from tests.tool_templates import HERMES_STYLE
from tests.unit.gateway.api.tools.calls import ARGUMENTS, HELLO, NOW, TOOL, TWO_CALLS, streamed


async def test_a_rescue_within_the_arguments(share_gateway: Share) -> None:
    """The first worker fails there; the second continues, and the deltas equal those of an undisturbed answer."""
    gateway = await share_gateway(model_card=replace(card(), chat_template=HERMES_STYLE, context_length=4096))
    place = TWO_CALLS.index("Köln") + 2

    async def fail_then_finish(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens(TWO_CALLS[:place], (1, 2))
            await attempt.fail("worker_draining", "bye", retryable=True)
            return
        assert attempt.job.resume[0].text_chars == place
        await attempt.tokens(TWO_CALLS[place:], (3, 4), finish_reason="stop")
        await attempt.finish()

    worker = await gateway.add_worker(script=fail_then_finish)
    [choice] = await streamed(gateway)
    assert choice["calls"] == [["get_weather", ARGUMENTS], ["now", "{}"]]
    assert (choice["end"], len(worker.attempts)) == ("tool_calls", 2)
    tools: list[Any] = [TOOL, NOW]
    answer: Any = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, tools=tools)
    assert [call.function.arguments for call in answer.choices[0].message.tool_calls] == [ARGUMENTS, "{}"]
    records = await gateway.records(2)
    assert [(record.attempts, record.completion_tokens) for record in records] == [(2, 4)] * 2
