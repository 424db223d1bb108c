"""``spillway bench engine`` as its users call it."""

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner, Result

from spillway.bench.in_process import EngineTarget
from spillway.bench.measure import Answer, Load
from spillway.cli import app
from tests.unit.engine.tiny_models import byte_level_tokenizer, llama

SMALL = ["--prompt-tokens", "8,16", "--batch", "1,3", "--new-tokens", "4", "--rounds", "2", "--threads", "1"]
ROW_FIELDS = {
    "prompt_tokens",
    "batch",
    "new_tokens",
    "prefill_s",
    "prefill_tokens_per_s",
    "decode_s",
    "decode_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "itl_p99_ms",
    "total_s",
    "total_tokens_per_s",
    "counted_prompt_tokens",
    "counted_new_tokens",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: two layers, 256 tokens of context."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    llama().save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "engine", *map(str, arguments)])


def words(text: str) -> str:
    """Return the output without the terminal's colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def test_a_table_json_and_a_picture(tiny: Path, tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    done = bench("--model", tiny, *SMALL, "--json", figures, "--picture", picture, "--set", "max_sequences=2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny · ")
    assert "float32" in lines[0]
    rows = [line.split() for line in lines if re.match(r"\s+\d", line)]
    assert [row[:3] for row in rows] == [["8", "1", "4"], ["8", "3", "4"], ["16", "1", "4"], ["16", "3", "4"]]

    report = json.loads(figures.read_text())
    assert report["benchmark"] == "engine"
    assert report["rounds"] == 2
    assert report["skipped"] == []
    environment = report["environment"]
    assert (environment["model"], environment["dtype"], environment["device"]) == (str(tiny), "float32", "cpu")
    assert environment["threads"] == 1
    assert environment["settings"]["max_sequences"] == 2
    assert environment["device_name"]
    assert environment["spillway"]
    for row in report["rows"]:
        assert set(row) == ROW_FIELDS
        assert (row["counted_prompt_tokens"], row["counted_new_tokens"]) == (row["prompt_tokens"], 4)
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]

    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(image[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == (2100, 720)
    assert 20_000 < len(image) < 1_000_000


def test_a_picture_may_be_an_svg(tiny: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    assert bench("--model", tiny, *SMALL, "--picture", picture).exit_code == 0
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_json_alone_goes_to_standard_output_and_what_does_not_fit_is_skipped(tiny: Path) -> None:
    done = bench("--model", tiny, "--prompt-tokens", "8,255", "--batch", "1", "--new-tokens", "4", "--json", "-")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert [row["prompt_tokens"] for row in report["rows"]] == [8]
    (skipped,) = report["skipped"]
    assert skipped["prompt_tokens"] == 255
    assert "256" in skipped["reason"]
    assert "skipped: 255 + 4 tokens, batch 1" in words(done.stderr)


def test_nothing_that_fits_is_a_failure(tiny: Path) -> None:
    assert bench("--model", tiny, "--prompt-tokens", "1000", "--rounds", "1").exit_code == 1


def test_a_pools_own_settings_are_measured(tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "spillway.toml"
    config.write_text(
        '[models.tiny]\n[pools.cheap]\nmodels = ["tiny"]\n'
        f'[pools.cheap.engine]\nkind = "spillway"\npath = "{tiny}"\nmax_batched_tokens = 128\nthreads = 1\n'
        '[pools.fake]\nmodels = ["tiny"]\n[pools.fake.engine]\nkind = "scripted"\n'
    )
    done = bench("--config", config, "--pool", "cheap", *SMALL, "--json", "-", "--set", "draft_tokens=2")
    settings = json.loads(done.stdout)["environment"]["settings"]
    assert (settings["max_batched_tokens"], settings["draft_tokens"]) == (128, 2)

    unknown = bench("--config", config, "--pool", "dear")
    assert unknown.exit_code == 1
    assert "pools.dear: no such pool; defined pools: cheap, fake" in words(unknown.stderr)
    scripted = bench("--config", config, "--pool", "fake")
    assert scripted.exit_code == 1
    assert "pools.fake.engine.kind" in words(scripted.stderr)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch", "1,x"], "--batch"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--new-tokens", ""], "--new-tokens"),
        (["--set", "max_sequences"], "--set"),
        (["--set", "path=elsewhere"], "--set"),
        (["--picture", "picture.bmp"], "--picture"),
        (["--picture", "/nowhere/picture.png"], "--picture"),
        (["--json", "/nowhere/figures.json"], "--json"),
        (["--config", "spillway.toml"], "--pool"),
        (["--url", "http://127.0.0.1:1", "--pool", "cheap"], "--pool"),
        (["--url", "http://127.0.0.1:1", "--threads", "1"], "--threads"),
    ],
)
def test_options_that_make_no_sense_are_named(arguments: list[str], complaint: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert complaint in words(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "colour=blue"], "colour"),
        (["--set", "max_sequences=0"], "max_sequences"),
        (["--dtype", "int3"], "dtype"),
        (["--model", "./nowhere"], "./nowhere cannot be loaded"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1"),
    ],
)
def test_what_cannot_be_measured_ends_with_its_reason(arguments: list[str], complaint: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == 1
    assert complaint in words(done.stderr)
    assert "Traceback" not in done.output


def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = bench("--model", "./nowhere", "--picture", tmp_path / "picture.png")
    assert done.exit_code == 1
    assert "pip install 'spillway-gateway[bench]'" in words(done.stderr)


def test_ctrl_c_reports_what_was_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = EngineTarget.run

    def run_until_the_second_load(target: EngineTarget, load: Load, seed: int) -> list[Answer]:
        if seed >= 2:
            raise KeyboardInterrupt
        return run(target, load, seed)

    monkeypatch.setattr(EngineTarget, "run", run_until_the_second_load)
    figures = tmp_path / "figures.json"
    done = bench("--model", tiny, *SMALL, "--json", figures)
    assert done.exit_code == 130
    assert [(row["prompt_tokens"], row["batch"]) for row in json.loads(figures.read_text())["rows"]] == [(8, 1)]
