"""Likelihoods, as evaluation harnesses ask for them, against transformers' own numbers for the demo model."""

from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.system import System

TEXT = "Spillway is a gateway. A gateway answers requests, and a worker makes the tokens. " * 6
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="module")
def prompt(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) > 100, "more than one frame of logprobs"
    return ids


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> torch.Tensor:
    """Logprobs of every token [P - 1, V] after those before it."""
    torch.set_num_threads(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], dim=-1)


@pytest.fixture
def client(system: System):
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, max_retries=0) as client:
        yield client


def own(expected: torch.Tensor, prompt: list[int]) -> list[float]:
    return expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


def test_loglikelihood_of_a_batch_as_lm_eval_asks(
    client: openai.OpenAI, system: System, prompt: list[int], expected: torch.Tensor
) -> None:
    batch = [prompt, prompt[:7], prompt[:60]]
    done = client.completions.create(
        model=system.model, prompt=batch, max_tokens=1, temperature=0, logprobs=1, seed=1234, echo=True
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    for ids, choice in zip(batch, done.choices, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        told = choice.logprobs.token_logprobs[1 : len(ids)]
        assert told == pytest.approx(own(expected[: len(ids) - 1], ids), abs=TOLERANCE)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (sum(map(len, batch)), 3)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_as_lm_eval_asks(
    client: openai.OpenAI, system: System, prompt: list[int], expected: torch.Tensor, max_tokens: int
) -> None:
    done = client.completions.create(
        model=system.model, prompt=[prompt], max_tokens=max_tokens, temperature=0, logprobs=1, seed=1234, echo=True
    )
    [choice] = done.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.token_logprobs) == len(prompt) + max_tokens
    scored: list[float | None] = [*logprobs.token_logprobs]
    assert scored[0] is None
    told = scored[1 : len(prompt)]
    assert told == pytest.approx(own(expected, prompt), abs=TOLERANCE)
    best = expected.max(dim=-1).values.tolist()
    assert [max(top.values()) for top in logprobs.top_logprobs[1 : len(prompt)]] == pytest.approx(best, abs=TOLERANCE)
    assert choice.text == "".join(logprobs.tokens)
    assert choice.finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), max_tokens)


def test_a_streamed_echo_says_the_same(client: openai.OpenAI, system: System, prompt: list[int]) -> None:
    asked: dict[str, Any] = {
        "model": system.model,
        "prompt": prompt,
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
        "n": 2,
    }
    asked |= {"temperature": 0}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    numbers: list[list[float | None]] = [[], []]
    for chunk in client.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        numbers[choice.index] += (choice.logprobs.token_logprobs or []) if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    for index, choice in enumerate(whole.choices):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert numbers[index][0] is None
        assert numbers[index][1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=TOLERANCE)


def test_prompt_logprobs_as_vllm_tells_them(
    client: openai.OpenAI, system: System, prompt: list[int], expected: torch.Tensor, tokenizer: PreTrainedTokenizerFast
) -> None:
    body = {"prompt_logprobs": 2, "return_token_ids": True}
    done: Any = client.completions.create(model=system.model, prompt=prompt, max_tokens=2, extra_body=body)
    told = done.choices[0].prompt_logprobs
    assert done.choices[0].prompt_token_ids == prompt
    assert len(done.choices[0].token_ids) == 2
    assert told[0] is None
    assert [entry[str(id_)]["logprob"] for id_, entry in zip(prompt[1:], told[1:], strict=True)] == pytest.approx(
        own(expected, prompt), abs=TOLERANCE
    )
    assert all(2 <= len(entry) <= 3 for entry in told[1:])
    chat: Any = client.chat.completions.create(
        model=system.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=2, extra_body=body
    )
    assert "Hi" in tokenizer.decode(chat.prompt_token_ids)
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids)


def test_scored_requests_are_in_the_ledger(system: System, prompt: list[int]) -> None:
    token = system.command("keys", "create", "scores").splitlines()[0]
    with openai.OpenAI(
        base_url=f"{system.base_url}/v1", api_key=token
    ) as scorer:  # again, where the key is still on its way
        scorer.completions.create(model=system.model, prompt=prompt, max_tokens=0, echo=True)
    row = system.wait_for_usage_of("scores")
    assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (1, len(prompt), 0)


def test_small_fields(client: openai.OpenAI, system: System, tokenizer: PreTrainedTokenizerFast) -> None:
    def text(**fields: Any) -> str:
        asked: dict[str, Any] = {"model": system.model, "prompt": "Spillway is", "max_tokens": 12, "temperature": 0}
        return str(client.completions.create(**asked, extra_body=fields).choices[0].text)

    plain = text()
    word = plain.split()[1]
    assert word not in text(bad_words=[word])
    stop = plain[4:8]
    assert text(stop=stop, include_stop_str_in_output=True) == plain[: plain.index(stop) + len(stop)]
    [allowed] = tokenizer.encode(" gateway", add_special_tokens=False)[:1]
    assert text(allowed_token_ids=[allowed]) == tokenizer.decode([allowed]) * 12
    assert text(top_p=0, temperature=1.5) == plain
    assert text(guided_choice=["one thing"]) == "one thing"
    long = "Something else altogether. Spillway is"
    kept = len(tokenizer.encode("Spillway is", add_special_tokens=False))
    assert text(prompt=long, truncate_prompt_tokens=kept, echo=True).lstrip().startswith("Spillway is")
    turn = {"role": "assistant", "content": "Spillway is a"}
    messages: list[Any] = [{"role": "user", "content": "What is Spillway?"}, turn]
    done = client.chat.completions.create(
        model=system.model, messages=messages, max_tokens=5, extra_body={"continue_final_message": True}, temperature=0
    )
    assert done.choices[0].message.content
    assert not done.choices[0].message.content.startswith("Spillway")
    tier = {"service_tier": "flex"}
    flex: Any = client.completions.create(model=system.model, prompt="x", max_tokens=1, extra_body=tier)
    assert flex.service_tier == "flex"
