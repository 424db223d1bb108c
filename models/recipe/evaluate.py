"""Measure the demo model on unseen phrasings: `python -m models.recipe.evaluate [model folder]`.

Exact: the greedy answer equals the written one. First sentence: its first sentence does. Unseen: questions from
data/unseen.txt about things that are not in the training data, which must get the written answer. Sampled: the same
measures at temperature 1 over the first phrasing of every question.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from models.recipe.chats import DATA_FOLDER, Conversation, read_conversations

MAX_ANSWER_TOKENS = 400
BATCH_SEQUENCES = 32
GREEDY: dict[str, Any] = {"do_sample": False}


def training_files() -> list[Path]:
    """Return the training data files: all except unseen.txt."""
    return [path for path in DATA_FOLDER.glob("*.txt") if path.name != "unseen.txt"]


def prompts_of(conversation: Conversation, *, held_out: bool) -> list[tuple[list[dict[str, str]], str]]:
    """Return (messages, expected answer) for every turn: its held-out phrasings, or else its first trained one."""
    history: list[dict[str, str]] = []
    prompts = []
    for turn in conversation:
        questions = turn.held_out if held_out else turn.questions[:1]
        prompts += [([*history, {"role": "user", "content": question}], turn.answer) for question in questions]
        history += [
            {"role": "user", "content": turn.questions[0]},
            {"role": "assistant", "content": turn.answer},
        ]
    return prompts


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[list[dict[str, str]]],
    *,
    temperature: float = 0.0,
) -> list[str]:
    """Return the model's answers to chats, in order, computed in batches: greedy, or sampled without truncation."""
    choice = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else GREEDY
    answers: list[str] = []
    for start in range(0, len(chats), BATCH_SEQUENCES):
        inputs: Any = tokenizer.apply_chat_template(
            chats[start : start + BATCH_SEQUENCES],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        generate: Any = model.generate
        output = generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, **choice)
        answers += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop, question mark, exclamation mark or line end."""
    return re.split(r"(?<=[.!?])\s|\n", text, maxsplit=1)[0]


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, show_misses: bool = False
) -> dict[str, Any]:
    """Return the measures described in this module's docstring."""
    trained = read_conversations(training_files())
    unseen = read_conversations([DATA_FOLDER / "unseen.txt"])
    held_out = [prompt for conversation in trained for prompt in prompts_of(conversation, held_out=True)]
    known = [prompt for conversation in trained for prompt in prompts_of(conversation, held_out=False)]
    strange = [([{"role": "user", "content": q}], t.answer) for (t,) in unseen for q in (*t.questions, *t.held_out)]
    figures: dict[str, Any] = {}
    for name, prompts, temperature in (("held_out", held_out, 0.0), ("unseen", strange, 0.0), ("sampled", known, 1.0)):
        answers = answer(model, tokenizer, [messages for messages, _ in prompts], temperature=temperature)
        pairs = [(given, expected) for given, (_, expected) in zip(answers, prompts, strict=True)]
        figures[f"{name}_questions"] = len(pairs)
        figures[f"{name}_exact"] = round(sum(g == e for g, e in pairs) / len(pairs), 3)
        same_start = [first_sentence(g) == first_sentence(e) for g, e in pairs]
        figures[f"{name}_first_sentence"] = round(sum(same_start) / len(pairs), 3)
        for (messages, expected), given, right in zip(prompts, answers, same_start, strict=True):
            if show_misses and not right:
                print(f"{name}: {messages[-1]['content']}\n  expected {expected!r}\n  got      {given!r}")
    return figures


def main() -> None:
    """Load a model folder; print the misses and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/spillway-demo"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    print(json.dumps(evaluate(model, tokenizer, show_misses=True)))


if __name__ == "__main__":
    main()
