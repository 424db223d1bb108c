"""The Triton kernels, run by Triton's interpreter on a CPU and compared with the reference.

The interpreter does not support bfloat16 (its products treat the bit patterns as integers). Another test compiles the
launches for real GPUs, including bfloat16.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="has no build for this system")

from engine import GenerationRequest, SamplingParams
from engine.attention.paged_attention import PagedKVPool, attend_by_reference
from engine.attention.triton_attention import attend
from tests.unit.engine.paged_cases import CASES, layer_of
from tests.unit.engine.tiny_models import greedy_reference, llama, make_engine, run

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's warning where exp2 saturates
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_the_reference(name: str) -> None:
    case = CASES[name]
    query, keys, values, step, options = layer_of(case)
    expected = attend_by_reference(query, keys, values, step, options)
    assert expected.isfinite().all()
    tolerance = 1e-5 if case.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(
        attend(query, keys, values, step, options, splits=case.splits), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.usefixtures("paged")
def test_an_engine_on_the_kernels_agrees_with_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.engine.make_kv_memory", partial(PagedKVPool, attention=partial(attend, splits=2)))
    model = llama()
    prompts = [[20, 21, 22, 23, 24, 25], [30], [40, 41, 42]]
    expected = [greedy_reference(model, prompt, 4) for prompt in prompts]
    engine = make_engine(model, max_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    answers = run(engine, *(GenerationRequest(str(n), prompt, params) for n, prompt in enumerate(prompts)))
    assert [answers[str(n), 0].token_ids for n in range(len(prompts))] == expected


def test_every_kind_of_launch_compiles_for_gpus(tmp_path: Path) -> None:
    """Compile to machine code for Ampere and Hopper, within the shared memory of the smallest card of each."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.unit.engine.compile_kernels"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 7
