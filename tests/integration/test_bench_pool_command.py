"""``spillway bench pool`` as its users call it, against the scripted engine and servers that are replays."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from typer.testing import CliRunner, Result

from pool_worker.settings import ServerEngineSettings
from spillway.bench.measure import Answer, Load
from spillway.bench.pool import PoolTarget
from spillway.cli import app
from spillway.config import DEMO_MODEL_PATH
from tests.conformance.chat_replay import ChatReplay
from tests.conformance.replay import SLOTS, Handlers, Replay, running
from tests.integration.test_bench_command import ROW_FIELDS, words
from tests.waiting import HANGS_S

SMALL = ["--prompt-tokens", "8,16", "--batch", "1,3", "--new-tokens", "4", "--rounds", "2", "--max-tpot-ms", "60000"]
TEMPLATE = """
[models.m]
{of_model}
[pools.p]
models = ["m"]
{pool}
[pools.p.engine]
{engine}
"""


def bench(*arguments: str | Path, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["bench", "pool", *map(str, arguments)], input=answer)


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., list[str]]:
    """Write a configuration of one pool; return the arguments that name it."""

    def write(pool: str = "", of_model: str = "", **engine: Any) -> list[str]:
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in engine.items())
        config = tmp_path / "spillway.toml"
        config.write_text(TEMPLATE.format(pool=pool, of_model=of_model, engine=lines))
        return ["p", "--config", str(config)]

    return write


def of_server(replay: Replay, **more: Any) -> dict[str, Any]:
    return {"kind": replay.kind, "url": replay.url, "tokenizer": str(DEMO_MODEL_PATH), "ready_s": HANGS_S, **more}


def pasted(stdout: str) -> dict[str, Any]:
    """The lines to paste, read as TOML."""
    engine: dict[str, Any] = tomllib.loads(stdout[stdout.index("# Concurrent requests") :])["pools"]["p"]["engine"]
    return engine


def test_a_table_lines_to_paste_json_and_a_picture(configured: Callable[..., list[str]], tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    done = bench(*configured(kind="scripted", max_kv_tokens=5000), *SMALL, "--json", figures, "--picture", picture)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("m · pool p · scripted")
    rows = [line.split()[:3] for line in done.stdout.splitlines() if re.match(r"\s+\d", line)]
    assert rows == [["8", "1", "4"], ["16", "1", "4"], ["8", "3", "4"], ["16", "3", "4"]]
    report = json.loads(figures.read_text())
    assert (report["benchmark"], report["rounds"], report["skipped"]) == ("pool", 2, [])
    assert report["environment"]["kind"] == "scripted"
    for row in report["rows"]:
        assert set(row) == ROW_FIELDS
        assert (row["counted_prompt_tokens"], row["counted_new_tokens"]) == (row["prompt_tokens"], 4)
    recommended = report["recommended"]
    assert recommended["max_sequences"] in {1, 3}
    assert pasted(done.stdout) == {"max_sequences": recommended["max_sequences"], "max_kv_tokens": 5000}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "sglang", "tgi", "ollama", "openai_completions"])
def test_a_server_is_measured_through_its_adapter(configured: Callable[..., list[str]], kind: str) -> None:
    with running(Replay(kind)) as replay:
        pool = configured(**of_server(replay, max_model_len=200))
        done = bench(*pool, *SMALL, "--json", "-")
        assert done.exit_code == 0, done.output
        asked = len(replay.bodies)
    report = json.loads(done.stdout)
    assert [row["counted_new_tokens"] for row in report["rows"]] == [4, 4, 4, 4]
    warm_up, rounds = 1 + 3, 2 * (1 + 1 + 3 + 3)
    refused = 0 if report["environment"]["ends_ignored"] else 1  # once, before anything is sent
    assert asked == warm_up + rounds, refused
    ServerEngineSettings(**of_server(replay, max_sequences=report["recommended"]["max_sequences"]))


def test_a_servers_own_limits_are_kept_and_told(configured: Callable[..., list[str]]) -> None:
    """llama.cpp tells its slots; more at once would only wait in it."""
    with running(Replay("llamacpp")) as replay:
        done = bench(*configured(**of_server(replay, max_sequences=1)), *SMALL, "--batch", f"1,{SLOTS},{SLOTS + 1}")
    assert done.exit_code == 0
    assert f"batch {SLOTS + 1}: the engine runs at most {SLOTS} concurrent requests" in words(done.stderr)
    assert f"batch {SLOTS}:" not in words(done.stderr)
    assert "max_kv_tokens: the server does not report" in done.stdout


class RememberingReplay(Replay):
    """With the page on which vLLM tells its memory."""

    def pages(self) -> Handlers:
        page = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="5"} 1.0\n'
        return {**super().pages(), "/metrics": lambda _: Response(page, media_type="text/plain")}


def test_what_a_servers_memory_holds_is_recommended_and_not_passed(configured: Callable[..., list[str]]) -> None:
    with running(RememberingReplay("vllm")) as replay:
        done = bench(*configured(**of_server(replay)), *SMALL, "--batch", "1,8")
    assert done.exit_code == 0
    assert pasted(done.stdout)["max_kv_tokens"] == 80
    assert "skipped: 8 + 4 tokens, batch 8: the engine's KV memory holds 80 tokens" in words(done.stderr)


def test_an_api_is_asked_in_messages_and_counts_itself(configured: Callable[..., list[str]]) -> None:
    with running(ChatReplay()) as replay:
        engine = {"kind": "openai_chat", "profile": "openai", "model": "m-1", "url": replay.url}
        counted_by = f'tokenizer = "{DEMO_MODEL_PATH}"'
        pool = 'tier = "hosted"\nprices = { m = { prompt = 2.5, completion = 10.0 } }'
        asked = configured(pool, counted_by, **engine)
        unpaid = bench(*asked, *SMALL, answer="n\n")
        assert unpaid.exit_code == 1
        assert replay.bodies == []
        assert "pools.p is a hosted API. You pay for 224 prompt tokens and 80 new tokens" in words(unpaid.stderr)
        done = bench(*asked, *SMALL, "--yes", "--json", "-")
        assert done.exit_code == 0, done.output
        assert {body["model"] for body in replay.bodies} == {"m-1"}
    report = json.loads(done.stdout)
    assert report["environment"]["ends_ignored"] is False
    assert {row["counted_prompt_tokens"] for row in report["rows"]} == {11}  # as the replay counts
    assert report["recommended"]["max_kv_tokens"] is None


def test_time_is_bounded(configured: Callable[..., list[str]]) -> None:
    """Loads that did not end in time are named; if they were waited for, this would take a minute for each."""
    done = bench(*configured(kind="scripted", ttft_s=60.0), *SMALL, "--seconds", "1")
    assert done.exit_code == 1
    assert words(done.stderr).count("(--seconds)") == 4


def test_what_was_done_in_time_counts(configured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    run = PoolTarget.run

    def run_while_there_is_time(target: PoolTarget, load: Load, seed: int) -> list[Answer]:
        if seed >= 3:  # the second round of the second load
            target._deadline_s = 0.0
        return run(target, load, seed)

    monkeypatch.setattr(PoolTarget, "run", run_while_there_is_time)
    done = bench(*configured(kind="scripted"), *SMALL, "--json", "-")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert [(row["prompt_tokens"], row["batch"]) for row in report["rows"]] == [(8, 1), (16, 1)]
    assert [one["reason"] for one in report["skipped"]] == ["not started: 300 s for all loads (--seconds) are over"] * 2


def test_what_does_not_fit_is_skipped(configured: Callable[..., list[str]]) -> None:
    pool = configured(kind="scripted", max_model_len=20, max_sequences=2)
    done = bench(*pool, "--prompt-tokens", "8,17", "--batch", "1,2,3", "--new-tokens", "4")
    assert done.exit_code == 0
    said = words(done.stderr)
    assert "skipped: 17 + 4 tokens, batch 1: a request can have at most 20 tokens" in said
    assert "skipped: 8 + 4 tokens, batch 3: the engine runs at most 2 concurrent requests" in said


def failing(status: int) -> Callable[[Request], Response]:
    return lambda request: JSONResponse({"error": "CUDA out of memory"}, status)


def test_a_server_that_fails_a_load_is_measured_on(configured: Callable[..., list[str]]) -> None:
    with running(Replay("vllm")) as replay:
        replay.faults.extend([failing(500)] * 2)  # both warm-ups, or one of three requests
        done = bench(*configured(**of_server(replay)), *SMALL, "--rounds", "1", "--json", "-")
        assert replay.streams == 0
    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["rows"]) == 4
    with running(Replay("vllm")) as replay:
        replay.faults.extend([failing(500)] * 100)
        done = bench(*configured(**of_server(replay)), *SMALL, "--rounds", "1")
    assert done.exit_code == 1
    assert words(done.stderr).count("the server answered 500") == 4


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (
            {"kind": "vllm", "url": "http://127.0.0.1:1", "tokenizer": str(DEMO_MODEL_PATH), "ready_s": 0.0},
            "pools.p: http://127.0.0.1:1 is not ready after",
        ),
        ({"kind": "vllm", "url": "http://127.0.0.1:1", "tokenizer": "./nowhere"}, "pools.p: engine.tokenizer"),
        (
            {
                "kind": "vllm",
                "url": "http://127.0.0.1:{port}",
                "tokenizer": str(DEMO_MODEL_PATH),
                "exec": "sh -c 'echo no such model; exit 3' {port}",
            },
            "the server ended with exit code 3; last log lines: no such model",
        ),
        ({"kind": "scripted", "task": "embed"}, "pools.p: serves embeddings"),
        ({"kind": "spillway", "path": "./nowhere"}, "pools.p: "),
    ],
)
def test_what_cannot_be_measured_ends_with_its_reason(
    configured: Callable[..., list[str]], engine: dict[str, Any], complaint: str
) -> None:
    done = bench(*configured(**engine))
    assert done.exit_code == 1
    assert complaint in words(done.stderr)
    assert "Traceback" not in done.output


def test_a_pool_that_is_not_there_is_named_beside_those_that_are(configured: Callable[..., list[str]]) -> None:
    _, *config = configured(kind="scripted")
    done = bench("q", *config)
    assert done.exit_code == 1
    assert "pools.q: no such pool; defined pools: p" in words(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch", "1,x"], "--batch"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--seconds", "0"], "--seconds"),
        (["--max-tpot-ms", "0"], "--max-tpot-ms"),
        (["--set", "max_sequences"], "--set"),
        (["--picture", "picture.bmp"], "--picture"),
        (["--json", "/nowhere/figures.json"], "--json"),
    ],
)
def test_options_that_make_no_sense_are_named(
    configured: Callable[..., list[str]], arguments: list[str], complaint: str
) -> None:
    done = bench(*configured(kind="scripted"), *arguments)
    assert done.exit_code == 2
    assert complaint in words(done.stderr)


def test_keys_of_the_engine_can_be_set(configured: Callable[..., list[str]]) -> None:
    done = bench(*configured(kind="scripted"), *SMALL, "--set", "max_kv_tokens=777")
    assert pasted(done.stdout)["max_kv_tokens"] == 777
    unknown = bench(*configured(kind="scripted"), "--set", "colour=blue")
    assert unknown.exit_code == 1
    assert "pools.p.engine.colour" in words(unknown.stderr)


def test_ctrl_c_reports_what_was_measured(
    configured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = PoolTarget.run

    def run_until_the_second_load(target: PoolTarget, load: Load, seed: int) -> list[Answer]:
        if seed >= 2:
            raise KeyboardInterrupt
        return run(target, load, seed)

    monkeypatch.setattr(PoolTarget, "run", run_until_the_second_load)
    figures = tmp_path / "figures.json"
    done = bench(*configured(kind="scripted"), *SMALL, "--json", figures)
    assert done.exit_code == 130
    assert [(row["prompt_tokens"], row["batch"]) for row in json.loads(figures.read_text())["rows"]] == [(8, 1)]
