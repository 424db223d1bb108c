"""The demo model's text: reads the data files, expands questions into phrasings, and adds typing noise.

A data file is plain text made of blocks separated by blank lines. Lines that start with `#` are comments.

    @country: France, Peru            a list that {country} in a question expands to
    T: continuous batching            a term; TERM_QUESTIONS makes the questions
    Q: What is Spillway?              a question; several Q and T lines are phrasings of one question
    A: Spillway is ...                the answer; the lines after it belong to it (a poem has several)
    Q: Why?                           a Q after an A opens the next turn of the same conversation
    A: Because ...
"""

import itertools
import random
import re
from dataclasses import dataclass
from pathlib import Path

DATA_FOLDER = Path(__file__).parent / "data"

TERM_QUESTIONS = (
    "What is {term}?",
    "What's {term}?",
    "What does {bare} mean?",
    "Explain {term}.",
    "Can you explain {term}?",
    "Define {bare}.",
    "Give me a definition of {term}.",
    "Tell me about {term}.",
    "What do you know about {term}?",
    "{bare}",
    "{bare}?",
    "What do people mean by {term}?",
    "I do not understand {term}.",
    "Explain {term} in simple words.",
    "Describe {term}.",
    "How would you describe {term}?",
    "What is meant by {bare}?",
    "Please explain to me what {term} is.",
)
LEAD_INS = (
    "Please: ",
    "Hey, ",
    "Hi, ",
    "Quick question: ",
    "Can you tell me: ",
    "I wonder: ",
    "Hello! ",
    "So, ",
    "OK, ",
)
LEAD_OUTS = (" please", " Thanks!", " Thank you.", " Please answer briefly.", " I am new here.")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Spillway's demo model.",
    "You are a helpful, honest assistant. Answer in plain English.",
    "Answer briefly.",
    "You are a friendly assistant who knows about LLM serving.",
)

# If a turn has at least four phrasings, one in eight is held out of training to measure generalization.
HELD_OUT_SHARE = 8
HELD_OUT_MIN_PHRASINGS = 4
HELD_OUT_MAX = 16


@dataclass(frozen=True)
class Turn:
    """One question, in all its phrasings, and its answer."""

    questions: tuple[str, ...]
    held_out: tuple[str, ...]  # phrasings never trained on
    answer: str


Conversation = tuple[Turn, ...]


def read_conversations(paths: list[Path]) -> list[Conversation]:
    """Return every block of the files as a conversation. Raises ValueError naming the malformed file and block."""
    conversations = []
    for path in sorted(paths):
        lists: dict[str, list[str]] = {}
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
            for name, values in (line[1:].split(":", 1) for line in lines if line.startswith("@")):
                lists[name] = [value.strip() for value in values.split(",")]
            body = [line for line in lines if not line.startswith("@")]
            if body:
                try:
                    conversations.append(_parse_block(body, lists))
                except (KeyError, ValueError) as error:
                    raise ValueError(f"{path.name}: {error}, in the block that starts {body[0]!r}") from error
    return conversations


def _parse_block(lines: list[str], lists: dict[str, list[str]]) -> Conversation:
    turns: list[tuple[list[str], list[str]]] = []
    for line in lines:
        kind, text = line[:2], line[3:]
        if kind in ("Q:", "T:"):
            if not turns or turns[-1][1]:
                turns.append(([], []))
            turns[-1][0].extend(_phrasings(kind, text, lists))
        elif not turns:
            raise ValueError("an answer comes before its question")
        else:
            turns[-1][1].append(text if kind == "A:" else line)
    return tuple(_make_turn(questions, "\n".join(answer).strip()) for questions, answer in turns)


def _phrasings(kind: str, text: str, lists: dict[str, list[str]]) -> list[str]:
    names = re.findall(r"\{(\w+)\}", text)
    phrasings = []
    for values in itertools.product(*(lists[name] for name in names)):
        filled = text.strip().format(**dict(zip(names, values, strict=True)))
        if kind == "Q:":
            phrasings.append(filled)
        else:
            bare = re.sub(r"^(a|an|the) ", "", filled)
            phrasings.extend(template.format(term=filled, bare=bare) for template in TERM_QUESTIONS)
    return phrasings


def _make_turn(questions: list[str], answer: str) -> Turn:
    if not answer:
        raise ValueError("a question has no answer")
    distinct = list(dict.fromkeys(questions))
    # A fixed choice per question, so that editing one block does not change the others' held-out phrasings.
    rng = random.Random(distinct[0])
    count = min(HELD_OUT_MAX, max(1, len(distinct) // HELD_OUT_SHARE)) if len(distinct) >= HELD_OUT_MIN_PHRASINGS else 0
    held_out = set(rng.sample(distinct[1:], count))
    return Turn(tuple(q for q in distinct if q not in held_out), tuple(q for q in distinct if q in held_out), answer)


def untidy(question: str, rng: random.Random) -> str:
    """Return the question as typed in a hurry: lower case, no full stop, a typing mistake, an extra word."""
    if rng.random() < 0.4:
        question = question.rstrip("?.!")
    if len(question.split()) >= 3 and rng.random() < 0.12:
        question = rng.choice(LEAD_INS) + question[0].lower() + question[1:]
    if len(question.split()) >= 3 and rng.random() < 0.06:
        question += rng.choice(LEAD_OUTS)
    if rng.random() < 0.35:
        question = question.lower()
    if len(question) > 8 and rng.random() < 0.15:
        question = _mistype(question, rng)
    return question


def _mistype(text: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(text) - 1)
    swapped = text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]
    return rng.choice((text[:at] + text[at + 1 :], text[:at] + text[at] + text[at:], swapped))


def sample_messages(conversation: Conversation, rng: random.Random) -> list[dict[str, str]]:
    """Return the conversation as chat messages, each question in a random trained phrasing with typing noise."""
    messages = []
    for turn in conversation:
        messages.append({"role": "user", "content": untidy(rng.choice(turn.questions), rng)})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages
