"""The quality lost to 8-bit integers: the demo model in float32 and with quantize = "int8", on the same fixed texts.

- *answers*: the written answers to the demo's held-out questions, whose wording was not in training;
- *licence*: the repository's LICENSE, a text unlike any that the model was trained on.

Perplexity is exp of the mean negative log-probability of each token given those before it (for answers: of the answer's
tokens only). *Top-1 agreement* is the share of these positions where both engines find the same token most probable.
*Same greedy answers* is the share of every eighth question for which both engines give identical answers, and *as
written* the share that equals the written answer.

    python -m benchmarks.engine_quality [--model FOLDER] [--threads 2]
"""

import argparse
import json
import math
import statistics
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine import GenerationRequest, LLMEngine, SamplingParams, SequenceOutput
from models.recipe.chats import read_conversations
from models.recipe.evaluate import MAX_ANSWER_TOKENS, prompts_of, training_files
from pool_worker.engines.local import load
from pool_worker.settings import LocalEngineSettings
from protocol.generation import PromptLogprob
from spillway.config import DEMO_MODEL_PATH

LICENCE: Final = Path(__file__).resolve().parents[1] / "LICENSE"
PIECE_TOKENS: Final = 512  # of the license, scored at once
GREEDY_EVERY: Final = 8
QUANTIZED: Final[tuple[Literal["int8"] | None, ...]] = (None, "int8")


@dataclass(frozen=True)
class Scored:
    """A text as token ids; only those from `first` on count."""

    token_ids: list[int]
    first: int


@dataclass(frozen=True)
class Question:
    """A chat up to its question, and the written answer."""

    prompt_ids: list[int]
    answer_ids: list[int]


def held_out_questions(tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    questions = []
    for conversation in read_conversations(training_files()):
        for messages, answer in prompts_of(conversation, held_out=True):
            chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt_ids = tokenizer.encode(chat, add_special_tokens=False)
            answer_ids = tokenizer.encode(answer, add_special_tokens=False)
            questions.append(Question(prompt_ids, [*answer_ids, tokenizer.eos_token_id]))
    return questions


def license_pieces(tokenizer: PreTrainedTokenizerBase) -> list[Scored]:
    token_ids = tokenizer.encode(LICENCE.read_text(), add_special_tokens=False, verbose=False)
    return [Scored(token_ids[at : at + PIECE_TOKENS], 1) for at in range(0, len(token_ids), PIECE_TOKENS)]


def run(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[SequenceOutput]]:
    """Return the outputs of each prompt, with the engine's maximum concurrency."""
    outputs: list[list[SequenceOutput]] = [[] for _ in prompts]
    for start in range(0, len(prompts), engine.info.max_sequences):
        for number, prompt in enumerate(prompts[start : start + engine.info.max_sequences], start):
            engine.add_request(GenerationRequest(str(number), prompt, params))
        while engine.has_unfinished():
            for output in engine.step():
                outputs[int(output.request_id)].append(output)
    return outputs


def score(engine: LLMEngine, texts: list[Scored]) -> tuple[float, list[int]]:
    """Return the perplexity, and the most probable token at each counted position."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    counted: list[PromptLogprob] = []
    for text, outputs in zip(texts, run(engine, [text.token_ids for text in texts], params), strict=True):
        counted += [token for output in outputs for token in output.prompt_logprobs or ()][text.first :]
    mean = statistics.fmean(token.logprob for token in counted if token.logprob is not None)
    return math.exp(-mean), [token.top[0][0] for token in counted]


def greedy(engine: LLMEngine, questions: list[Question]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    prompts = [question.prompt_ids for question in questions]
    return [[id_ for output in outputs for id_ in output.token_ids] for outputs in run(engine, prompts, params)]


def share_alike(left: list[Any], right: list[Any]) -> float:
    return statistics.fmean(a == b for a, b in zip(left, right, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL_PATH))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    start_s = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    questions = held_out_questions(tokenizer)
    texts = {
        "answers": [Scored(q.prompt_ids + q.answer_ids, len(q.prompt_ids)) for q in questions],
        "licence": license_pieces(tokenizer),
    }
    some = questions[::GREEDY_EVERY]
    perplexity: dict[str, dict[str, float]] = {name: {} for name in texts}
    best: dict[str, list[list[int]]] = {name: [] for name in texts}
    answers: list[list[list[int]]] = []
    for quantize in QUANTIZED:
        engine = load(LocalEngineSettings(path=args.model, threads=args.threads, quantize=quantize))
        for name, scored in texts.items():
            perplexity[name][quantize or "float32"], tokens = score(engine, scored)
            best[name].append(tokens)
        answers.append(greedy(engine, some))
    written = [question.answer_ids for question in some]
    report = {
        "benchmark": "engine_quality",
        "model": Path(args.model).name,
        "texts": {
            name: {
                "tokens": len(best[name][0]),
                "perplexity": {precision: round(value, 4) for precision, value in perplexity[name].items()},
                "top1_agreement": round(share_alike(*best[name]), 5),
            }
            for name in texts
        },
        "greedy": {
            "questions": len(some),
            "same_answers": round(share_alike(*answers), 4),
            "as_written": {
                quantize or "float32": round(share_alike(given, written), 4)
                for quantize, given in zip(QUANTIZED, answers, strict=True)
            },
        },
        "seconds": round(time.perf_counter() - start_s, 1),
        "torch": version("torch"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        or None,
    }
    print_table(report)
    print(json.dumps(report))


def print_table(report: dict[str, Any]) -> None:
    table = Table("", "float32", "int8", "alike", box=SIMPLE_HEAD)
    for name, figures in report["texts"].items():
        values = [f"{value:.3f}" for value in figures["perplexity"].values()]
        agreement = f"{figures['top1_agreement']:.2%} top-1"
        table.add_row(f"perplexity of {name}, {figures['tokens']:,} tokens", *values, agreement)
    found = report["greedy"]
    shares = [f"{value:.1%}" for value in found["as_written"].values()]
    table.add_row(
        f"greedy answers as written, of {found['questions']}", *shares, f"{found['same_answers']:.1%} of answers"
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
