"""``examples/two-clouds``, as its README says, against servers that answer as vLLM and Together do."""

import asyncio
from collections.abc import Callable

from protocol import subjects
from spillway.cli.connections import connect_admin
from spillway.config import DEMO_MODEL_PATH, load_config
from tests.acceptance.examples.conftest import Example
from tests.acceptance.system import System
from tests.conformance.chat_replay import ChatReplay
from tests.conformance.replay import Replay, running
from tests.waiting import HANGS_S, until

PAGE = "Two clouds and a hosted API"


def test_requests_move_from_cloud_to_cloud_and_to_the_api(example: Callable[[str], Example]) -> None:
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
            asyncio.run(until_waiting_for_jobs(clouds.system))
            printed = second.run(clouds.page.script(PAGE, 2, {}))
            asked = [line for line in printed.splitlines() if line.startswith("from: ")]
            assert asked == ["from: runpod spot", "from: aws on-demand", "from: together hosted"]
            clouds.system.wait_for_requests(3)
            [row] = clouds.system.usage()
            assert (row["requests"], row["failed"]) == (3, 0)
            first.press_ctrl_c()
        assert [len(server.bodies) for server in (runpod, aws, together)] == [1, 1, 1]
        assert together.headers[0]["authorization"] == "Bearer YOUR_KEY"


async def until_waiting_for_jobs(system: System) -> None:
    """Return once a pull of each cloud is parked in each lane that a request may take."""
    config = load_config(system.data_dir / "run" / "config.json", env={})
    bus = await connect_admin(config, "test", HANGS_S)

    async def parked() -> set[int]:
        consumers = (subjects.job_consumer("llama-8b", lane) for lane in subjects.HIGH_LANES)
        calls = (f"CONSUMER.INFO.{subjects.INTERACTIVE_STREAM}.{consumer}" for consumer in consumers)
        return {(await bus.api(call))["num_waiting"] for call in calls}

    async def is_ready() -> bool:
        return await parked() == {2}

    try:
        await until(is_ready)
    finally:
        await bus.close()
