"""The questions: a seeded mix of requests that covers everything a failover must preserve.

plain text · stop strings · log-probabilities · several choices · greedy and seeded sampling · streamed or whole ·
chat and plain completions · usage in the stream · the same as Responses and as Messages
"""

import random
from dataclasses import dataclass
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
END_TOKEN = "2"  # the demo model's
SUBJECTS = ("rivers", "queues", "bridges", "harbours", "kettles", "lanterns", "tides", "maps", "clocks", "gardens")
STOPS = ([" the", " over"], [" queue now"], [". "], [" you", " work"])


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the mix. Asked twice, it has the same answer."""

    number: int
    path: str
    body: dict[str, Any]
    kind: str = ""  # of those that a play answers

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_background(self) -> bool:
        """True if the answer is made apart from its caller, who reads it again where the connection breaks."""
        return bool(self.body.get("background"))

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    def with_seed(self, seed: int) -> "Question":
        """The same with another seed."""
        return Question(self.number, self.path, {**self.body, "seed": seed})


def questions(
    seed: int,
    count: int,
    model: str,
    *,
    scripted: bool,
    tokens: tuple[int, int],
    greedy: bool = False,
    surfaces: bool = True,
    background: bool = False,
) -> list[Question]:
    """Make the mix; ``tokens`` bounds the length of an answer. ``greedy``: what all makes of engine share.

    ``surfaces``: some as Responses and Messages. ``background``: all as streams of Responses in the background.
    """
    rng = random.Random(f"mix {seed}")
    made = [_question(rng, number, model, scripted=scripted, tokens=tokens) for number in range(count)]
    if background:
        return [_in_background(question) for question in made]
    if surfaces and not greedy:
        made = [_on_a_surface(question) if question.number % 3 == 0 else question for question in made]
    return [_greedy(question) for question in made] if greedy else made


def _greedy(question: Question) -> Question:
    """The same without chance, and without log-probabilities, which engines round differently.

    End tokens are biased away, since servers differ in what they make of ``ignore_eos``.
    """
    left_out = {"seed", "top_p", "logprobs", "top_logprobs", "ignore_eos"}
    body = {name: value for name, value in question.body.items() if name not in left_out}
    return Question(question.number, question.path, {**body, "temperature": 0, "logit_bias": {END_TOKEN: -100}})


def _question(rng: random.Random, number: int, model: str, *, scripted: bool, tokens: tuple[int, int]) -> Question:
    is_chat = rng.random() < 0.7
    length = rng.randint(*tokens)
    text = f"Question {number}: what is there to say about {rng.choice(SUBJECTS)}?"
    body: dict[str, Any] = {"model": model, "max_tokens": length, **_sampling(rng)}
    if scripted:
        text += f" [[tokens={length + rng.randint(-4, 4)}]]"  # some end by themselves, some by max_tokens
    else:
        body["ignore_eos"] = True  # a short answer is hard to hit
    if rng.random() < 0.25:
        body["stop"] = rng.choice(STOPS)
    if rng.random() < 0.2:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.25:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)} if is_chat else {"logprobs": rng.randint(0, 3)}
    if rng.random() < 0.8:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if is_chat:
        return Question(number, CHAT, {**body, "messages": [{"role": "user", "content": text}]})
    return Question(number, "/v1/completions", {**body, "prompt": text})


def _on_a_surface(question: Question) -> Question:
    """The same for another API, where it is a chat; no such API has a seed, so nothing is left to chance."""
    body = question.body
    if "messages" not in body or body.keys() & {"n", "logprobs", "stop"}:
        return question
    kept = {name: body[name] for name in ("model", "stream") if name in body} | {"temperature": 0}
    [message] = body["messages"]
    if question.number % 2:
        said = [{**message, "content": [{"type": "text", "text": message["content"]}]}]
        return Question(question.number, MESSAGES, {**kept, "max_tokens": body["max_tokens"], "messages": said})
    return Question(question.number, RESPONSES, {**kept, "max_output_tokens": body["max_tokens"], "input": [message]})


def _in_background(question: Question) -> Question:
    """The same as a streamed response in the background."""
    body = question.body
    said = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    fields = {"input": said, "max_output_tokens": body["max_tokens"], "temperature": 0}
    return Question(question.number, RESPONSES, {"model": body["model"], "stream": True, "background": True, **fields})


def _sampling(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"temperature": 0}
    return {"temperature": rng.choice((0.7, 1.0)), "top_p": 0.95, "seed": rng.randrange(1_000_000)}
