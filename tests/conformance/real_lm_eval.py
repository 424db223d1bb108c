"""The real lm-evaluation-harness against a whole Spillway with the demo model.

    make conformance-lm-eval

Its `local-completions` (likelihoods of choices, and answers) and `local-chat-completions` (answers) run two small tasks
of ``lm_eval_tasks/``, without a hub. Its scores must equal those of transformers alone for the same model. The harness
is installed on demand, in a separate environment (about 900 MB).
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers import pinned
from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.system import System

HERE: Final = Path(__file__).parent
TASKS: Final = HERE / "lm_eval_tasks"
LIMIT_S: Final = 600.0
MAX_TOKENS: Final = 48  # of an answer, as the task says
CHOICES: Final = "spillway_choices"
ANSWERS: Final = "spillway_answers"
# By the harness' model and kind of request: the route, its tasks, and further arguments.
RUNS: Final = {
    "local-completions": ("completions", (CHOICES, ANSWERS), ("tokenized_requests=True",)),
    "local-chat-completions": ("chat/completions", (ANSWERS,), ()),
}


def main() -> int:
    version = pinned.install("lm_eval", "lm_eval")
    python = pinned.ENVIRONMENTS / "lm_eval" / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="spillway-lm-eval-") as name:
        folder = Path(name)
        tasks = _tasks(folder)
        system = System(folder / "data", [])
        system.start()
        try:
            scores = {kind: _scores(python, kind, system, tasks, folder) for kind in RUNS}
        finally:
            system.stop()
    expected = _expected()
    sys.stdout.write(json.dumps({"lm_eval": version, "scores": scores, "expected": expected}) + "\n")
    return 0 if scores == expected else 1


def _tasks(folder: Path) -> Path:
    """Copy the tasks to a place where their data has an absolute path."""
    tasks = folder / "tasks"
    tasks.mkdir()
    for task in TASKS.glob("*.yaml"):
        (tasks / task.name).write_text(task.read_text().replace("DATA", str(TASKS / "facts.jsonl")))
    return tasks


def _scores(python: Path, kind: str, system: System, tasks: Path, folder: Path) -> dict[str, float]:
    route, names, more = RUNS[kind]
    model_args = [
        f"base_url={system.base_url}/v1/{route}",
        f"model={system.model}",
        f"tokenizer={DEMO_MODEL_PATH}",
        *more,
    ]
    command = [str(python), "-m", "lm_eval", "run", "--model", kind, "--model_args", ",".join(model_args)]
    command += ["--tasks", ",".join(names), "--include_path", str(tasks), "--output_path", str(folder / kind)]
    command += ["--apply_chat_template"] if kind == "local-chat-completions" else ["--batch_size", "4"]
    environment = {
        "OPENAI_API_KEY": system.api_key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "HOME": str(folder),
        "PATH": f"{python.parent}:/usr/bin:/bin",
    }  # fmt: skip
    subprocess.run(command, check=True, env=environment, timeout=LIMIT_S, stdout=sys.stderr)
    [results] = (folder / kind).rglob("results_*.json")
    told_scores: dict[str, Any] = json.loads(results.read_text())["results"]
    return {name: _score(told_scores[name]) for name in names}


def _score(result: dict[str, Any]) -> float:
    [score] = [value for name, value in result.items() if name.startswith(("acc,", "exact_match,"))]
    return float(score)


def _expected() -> dict[str, dict[str, float]]:
    """Return the scores by transformers alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32)
    documents = [json.loads(line) for line in (TASKS / "facts.jsonl").read_text().splitlines()]

    def likelihood(context: str, choice: str) -> float:
        ids = tokenizer.encode(f"{context} {choice}", add_special_tokens=False)
        begin = len(tokenizer.encode(context, add_special_tokens=False))
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, begin - 1 : -1], dim=-1)
        return float(logprobs.gather(1, torch.tensor(ids[begin:])[:, None]).sum())

    def chooses_well(document: dict[str, Any]) -> bool:
        found = [likelihood(document["question"], choice) for choice in document["choices"]]
        return bool(found.index(max(found)) == document["gold"])

    def answers_well(prompt: str) -> bool:
        ids = tokenizer.encode(prompt, add_special_tokens=False, return_tensors="pt")
        made = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0, ids.shape[1] :]
        return "gateway" in tokenizer.decode(made, skip_special_tokens=True).partition("\n\n")[0]

    def chat(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    questions = [f"What is Spillway? {document['question']}" for document in documents]
    answers = statistics.fmean(map(answers_well, questions))
    chosen = statistics.fmean(map(chooses_well, documents))
    of_chats = statistics.fmean(answers_well(chat(question)) for question in questions)
    return {"local-completions": {CHOICES: chosen, ANSWERS: answers}, "local-chat-completions": {ANSWERS: of_chats}}


if __name__ == "__main__":
    sys.exit(main())
