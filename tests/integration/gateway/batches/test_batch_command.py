"""``spillway batch`` against a running gateway."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openai
import pytest_asyncio
from typer.testing import CliRunner, Result

from spillway.cli import app
from tests.integration.gateway.batches.test_batches import QUICK, line
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, answer_hello, hold_until_cancelled
from tests.waiting import HANGS_S, until

Command = Callable[..., Coroutine[Any, Any, Result]]


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayUnderTest:
    return await share_gateway(batches=QUICK)


def command_of(gateway: GatewayUnderTest, key: str | None = None) -> Command:
    async def run(*arguments: str) -> Result:
        env = {"SPILLWAY_BASE_URL": gateway.url, "SPILLWAY_API_KEY": key or gateway.key, "OPENAI_API_KEY": None}
        async with asyncio.timeout(HANGS_S):
            return await asyncio.to_thread(CliRunner().invoke, app, ["batch", *arguments], env=env)

    return run


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


def read(path: Path) -> set[str]:
    return {json.loads(text)["custom_id"] for text in path.read_text().splitlines()}


async def test_the_batch_commands(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    await gateway.add_worker()
    batch = command_of(gateway)
    file = written(tmp_path / "lines.jsonl", line("a"), line("b"))
    done = await batch("submit", file, "--wait", "--output", str(tmp_path / "out.jsonl"))
    assert done.exit_code == 0, done.output
    batch_id = done.stdout.split()[0]
    assert read(tmp_path / "out.jsonl") == {"a", "b"}
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert "completed: 2 of 2 lines answered, 0 failed" in done.stderr
    listed = json.loads((await batch("list", "--json")).stdout)
    assert [(one["id"], one["endpoint"]) for one in listed] == [(batch_id, "/v1/chat/completions")]
    table = (await batch("list")).stdout
    assert batch_id in table
    assert "completed" in table
    shown = (await batch("show", batch_id)).stdout
    assert "completed: 2 of 2" in shown
    assert MODEL in shown
    assert json.loads((await batch("show", batch_id, "--json")).stdout)["status"] == "completed"
    assert (await batch("download", batch_id, "--output", str(tmp_path / "again"))).exit_code == 0
    assert read(tmp_path / "again") == {"a", "b"}
    none = await batch("download", batch_id, "--errors", "--output", str(tmp_path / "none"))
    assert (none.exit_code, "has no error file" in none.stderr) == (1, True)
    over = await batch("cancel", batch_id)
    assert (over.exit_code, "Cannot cancel a batch" in over.stderr) == (1, True)
    taken = await batch("download", batch_id, "--output", str(tmp_path / "again"))
    said = " ".join(taken.stderr.replace("│", " ").split())  # a box, whose lines break where the path lets them
    assert (taken.exit_code, "already exists" in said) == (2, True)


async def test_failed_lines_are_reported_with_the_error_file(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    await gateway.add_worker()
    batch = command_of(gateway)
    file = written(tmp_path / "lines.jsonl", line("good"), line("bad", temperature=9))
    out = tmp_path / "out.jsonl"
    done = await batch("submit", file, "--wait", "--output", str(out))
    assert done.exit_code == 1
    assert "1 of 2 lines failed; errors: " in done.stderr
    assert "out.errors.jsonl" in done.stderr
    assert (read(out), read(tmp_path / "out.errors.jsonl")) == ({"good"}, {"bad"})
    batch_id = done.stdout.split()[0]
    again = await batch("show", batch_id, "--wait")
    assert (again.exit_code, f"spillway batch download {batch_id} --errors" in again.stderr) == (1, True)
    invalid = await batch("submit", written(tmp_path / "no.jsonl", line("1", stream=True)), "--wait")
    assert (invalid.exit_code, "line 1: invalid_value: A line of a batch cannot" in invalid.stderr) == (1, True)


async def test_the_model_option_replaces_the_model(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    await gateway.add_worker()
    lines = [line("1", model="gpt-4"), {**line("2"), "body": {"messages": [{"role": "user", "content": "hi"}]}}]
    file = written(tmp_path / "lines.jsonl", *lines)
    done = await command_of(gateway)("submit", file, "--model", MODEL, "--window", "90m", "--wait")
    assert done.exit_code == 0, done.output
    client = gateway.client()
    made = [one async for one in client.batches.list()]
    assert [(one.model, one.completion_window) for one in made] == [(MODEL, "90m")]
    assert (await client.files.retrieve(made[0].input_file_id)).filename == "lines.jsonl"


async def test_a_batch_is_cancelled(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    worker = await gateway.add_worker(script=hold_until_cancelled)
    batch = command_of(gateway)
    batch_id = (await batch("submit", written(tmp_path / "lines.jsonl", line("1")))).stdout.strip()
    await until(lambda: worker.attempts)  # a line that has not begun does not count as failed
    early = await batch("download", batch_id, "--output", str(tmp_path / "out"))
    assert (early.exit_code, "has no output file yet: it is" in early.stderr) == (1, True)
    assert f"{batch_id} is cancelling" in (await batch("cancel", batch_id)).stdout
    over = await batch("show", batch_id, "--wait")
    assert (over.exit_code, "is cancelled: 1 of 1 lines failed" in over.stderr) == (1, True)


async def test_waiting_outlasts_the_gateway(start_gateway: Start, tmp_path: Path) -> None:
    first = await start_gateway(batches=QUICK)
    held = asyncio.Event()

    async def answer(attempt: Attempt) -> None:
        await held.wait()
        await answer_hello(attempt)

    await first.add_worker(script=answer)
    file = written(tmp_path / "lines.jsonl", *(line(str(number)) for number in range(40)))
    waiting = asyncio.create_task(command_of(first)("submit", file, "--wait", "--output", str(tmp_path / "out.jsonl")))
    client = first.client()
    await until_in_progress(client)
    await first.end()
    held.set()
    await somebody_has_asked_in_vain(first.port)
    await start_gateway(batches=QUICK, port=first.port)
    done = await waiting
    assert done.exit_code == 0, done.output
    assert "does not answer" in done.stderr
    assert read(tmp_path / "out.jsonl") == {str(number) for number in range(40)}


async def somebody_has_asked_in_vain(port: int) -> None:
    asked = asyncio.Event()

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        asked.set()

    async with asyncio.timeout(HANGS_S), await asyncio.start_server(hang_up, "127.0.0.1", port) as server:
        await asked.wait()
        server.close()


async def until_in_progress(client: openai.AsyncOpenAI) -> None:
    async with asyncio.timeout(HANGS_S):
        while "in_progress" not in [one.status async for one in client.batches.list()]:
            await asyncio.sleep(0.05)


async def test_errors_are_named(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    batch, file = command_of(gateway), written(tmp_path / "lines.jsonl", line("1"))
    (tmp_path / "broken").write_text("\n{\n")
    (tmp_path / "empty").write_text("\n")
    for arguments, message in (
        (("submit", str(tmp_path / "nothing")), "nothing: No such file"),
        (("submit", str(tmp_path / "broken")), "line 2: not a JSON object"),
        (("submit", str(tmp_path / "empty")), "has no lines"),
        (("submit", written(tmp_path / "nowhere", {"custom_id": "1"})), "use --endpoint"),
        (("submit", file, "--output", str(tmp_path / "out")), "requires --wait"),
        (("submit", file, "--wait", "--output", str(tmp_path / "no" / "out")), "no such folder"),
        (("submit", file, "--endpoint", "/v1/nothing"), "does not support batches"),
        (("submit", file, "--window", "soon"), "completion_window"),
        (("submit", file, "--api-key", "sk-wrong"), "Incorrect API key"),
        (("submit", file, "--base-url", "localhost"), "must start with http"),
        (("show", "batch_nothing"), "No batch found"),
    ):
        done = await batch(*arguments)
        assert done.exit_code in {1, 2}
        assert message in " ".join(done.stderr.replace("│", " ").split()), (arguments, done.stderr)
    nobody = CliRunner().invoke(app, ["batch", "list"], env={"SPILLWAY_API_KEY": None, "OPENAI_API_KEY": None})
    assert (nobody.exit_code, "no API key: use --api-key" in nobody.stderr) == (1, True)
