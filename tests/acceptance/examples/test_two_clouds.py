"""``examples/two-clouds``, as its README says, against servers that answer as vLLM and Together do."""

import json
from collections.abc import Callable

from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.examples.conftest import Example
from tests.acceptance.examples.terminal import Terminal
from tests.conformance.chat_replay import ChatReplay
from tests.conformance.replay import Replay, running
from tests.waiting import until

PAGE = "Two clouds and a hosted API"


async def test_requests_move_from_cloud_to_cloud_and_to_the_api(example: Callable[[str], Example]) -> None:
    clouds = example("two-clouds")
    (clouds.folder / "llama-8b").symlink_to(DEMO_MODEL_PATH)
    with running(Replay("vllm")) as runpod, running(Replay("vllm")) as aws, running(ChatReplay("openai")) as together:
        clouds.variables |= {
            "SPILLWAY_POOLS__RUNPOD__ENGINE__URL": runpod.url,
            "SPILLWAY_POOLS__AWS__ENGINE__URL": aws.url,
            "SPILLWAY_POOLS__TOGETHER__ENGINE__URL": together.url,
        }
        with clouds.terminal("first") as first, clouds.terminal("second") as second:
            serve = "vllm serve llama-8b --port 8001 --max-num-seqs 64 &\n"
            first.type(clouds.page.script(PAGE, 0, {serve: ""}))
            first.wait_for("worker-together-1: ready")
            second.run(clouds.page.script(PAGE, 1, {}))
            await until(lambda: serving(second) == {"runpod", "aws", "together"})
            printed = second.run(clouds.page.script(PAGE, 2, {}))
            asked = [line for line in printed.splitlines() if line.startswith("from: ")]
            assert asked == ["from: runpod spot", "from: aws on-demand", "from: together hosted"]
            [row] = second.wait_for_usage("model", 3)
            assert (row["requests"], row["failed"]) == (3, 0)
            first.press_ctrl_c()
        assert [len(server.bodies) for server in (runpod, aws, together)] == [1, 1, 1]
        assert together.headers[0]["authorization"] == "Bearer YOUR_KEY"


def serving(terminal: Terminal) -> set[str]:
    status = json.loads(terminal.run("spillway status --json"))
    return {worker["pool"] for worker in status["workers"] if worker["state"] == "serving"}
