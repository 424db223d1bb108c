"""The harness of the engine comparison: processes that answer, and correct figures."""

from pathlib import Path

import pytest

from benchmarks.engine_throughput import Load, System, SystemFailed, compare, draw, factors, measure
from benchmarks.peers.batch_system import load_continuous, load_generate, load_spillway
from tests.unit.engine.tiny_models import byte_level_tokenizer, llama

pytestmark = pytest.mark.slow

THROUGHPUT, TTFT = Load(4, 16, 8), Load(1, 64, 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    llama().save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def test_the_systems_give_the_same_tokens(tiny: Path) -> None:
    prompts = [[3, 5, 7, 11, 13], [200, 100, 50, 25, 12]]
    found = [load(str(tiny), 1)(prompts, 8) for load in (load_generate, load_continuous, load_spillway)]
    assert all(seconds > 0 for _, seconds in found)
    assert [len(output) for output in found[0][0]] == [8, 8]
    assert [outputs for outputs, _ in found] == [found[0][0]] * 3


def test_a_system_in_a_separate_process(tiny: Path, tmp_path: Path) -> None:
    system = System("spillway", tiny, 1, tmp_path)
    try:
        outputs, seconds = system.run([[3, 5, 7], [9, 11, 13]], 4)
        assert [len(output) for output in outputs] == [4, 4]
        assert seconds > 0
        assert system.cpu_s() > 0
        assert system.version
        with pytest.raises(SystemFailed, match="out of range|prompt_ids"):
            system.run([[]], 4)
    finally:
        system.end()


class Fake(System):
    """Answers with given tokens in a given time."""

    def __init__(self, name: str, seconds: float, last: int) -> None:
        self.name, self.version = name, "1"
        self.seconds, self.same_share = {}, []
        self.answers = self.same_answers = 0
        self.asked: list[str] = []
        self._answer = seconds, last

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        seconds, last = self._answer
        self.asked.append(str(prompts))
        return [[7] * (new_tokens - 1) + [last] for _ in prompts], seconds

    def cpu_s(self) -> float:
        return 0.0


def test_every_system_gets_the_same_prompts_and_the_first_round_does_not_count() -> None:
    systems = [Fake("generate", 1.0, 7), Fake("spillway", 0.5, 7), Fake("spillway-int8", 0.25, 8)]
    assert measure(systems, [THROUGHPUT, TTFT], rounds=2) == 0
    assert systems[0].asked == systems[1].asked == systems[2].asked
    assert len(set(systems[0].asked)) == 6
    assert systems[1].seconds == {THROUGHPUT: [0.5, 0.5], TTFT: [0.5, 0.5]}
    assert [system.answers for system in systems] == [15, 15, 15]
    assert [system.same_answers for system in systems] == [15, 15, 0]
    assert systems[2].same_share[:4] == [7 / 8] * 4


def test_the_first_differing_token() -> None:
    system = Fake("spillway", 1.0, 7)
    compare(system, [[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 9, 4], [1, 2, 3, 4]])
    assert (system.answers, system.same_answers, system.same_share) == (2, 1, [0.5, 1.0])


FOUND = {
    "generate": {"batch_4": 100.0, "ttft_ms": 40.0},
    "vllm": {"batch_4": 200.0, "ttft_ms": 80.0},
    "spillway": {"batch_4": 300.0, "ttft_ms": 20.0},
}


def test_factors_are_over_the_best_peer() -> None:
    assert factors(FOUND, [THROUGHPUT, TTFT]) == {"spillway": {"batch_4": 1.5, "ttft_ms": 2.0}}


def test_the_figures_can_be_drawn(tmp_path: Path) -> None:
    draw(FOUND, [THROUGHPUT, TTFT], "title", tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
