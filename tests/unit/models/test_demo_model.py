"""The demo model in the repository: an ordinary model folder that answers questions about Spillway."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models.recipe.chats import read_conversations, sample_messages
from models.recipe.evaluate import training_files

FOLDER = Path(__file__).parents[3] / "models" / "spillway-demo"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= 12 * 2**20


def test_the_model_is_a_small_llama_computed_in_float32(model):
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert 3e6 <= model.num_parameters() <= 6e6
    assert model.config.tie_word_embeddings
    assert model.config.head_dim == 64
    assert model.config.max_position_embeddings >= 1024
    assert AutoModelForCausalLM.from_pretrained(FOLDER).dtype == torch.float32


def test_the_ends_of_an_answer_are_declared(tokenizer, model):
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert GenerationConfig.from_pretrained(FOLDER).eos_token_id == ends
    assert tokenizer.eos_token_id == model.config.eos_token_id == ends[0]


@pytest.mark.parametrize(
    "text",
    [
        "What is Spillway?",
        " two  spaces\n\tand a tab",
        "Straße, naïve, 日本語, привет",
        "👩‍👩‍👧 🚀🏽 \u200d",
        "don't , stop .",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < len(tokenizer) <= 4096


def test_the_chat_template_renders_roles_and_text_parts(tokenizer):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_come_before_the_conversation(tokenizer):
    """Without tools, prompts equal those of the training."""
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    tools, conversation = rendered.split("</tool_call><|im_end|>\n", 1)
    assert '{"type": "function", "function": {"name": "now"' in tools
    assert conversation == (
        "<|im_start|>user\nWhat time is it?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
    )


def _ask(model, tokenizer, messages):
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    assert output[0, -1] == tokenizer.eos_token_id  # it ended by itself
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is Spillway?", {"Spillway is", "gateway", "queue", "OpenAI"}),  # as in docs/tutorials/first-hour.md
        ("what happens when a worker dies", {"pause", "another worker"}),
        ("How do I create an API key?", {"spillway keys create"}),
        ("What is the KV cache?", {"attention", "tokens"}),
        ("Hello", {"Hello", "demo model"}),
        ("What is the capital of France?", {"do not know"}),
    ],
)
def test_it_answers_core_questions(model, tokenizer, question, words):
    answer = _ask(model, tokenizer, [{"role": "user", "content": question}])
    assert all(word in answer for word in words), answer


def test_it_still_answers_late_in_a_long_conversation(model, tokenizer):
    history: list[dict[str, str]] = []
    for conversation in read_conversations(training_files()):
        if len(tokenizer.apply_chat_template(history)["input_ids"] if history else ()) > 1000:
            break
        history += sample_messages(conversation, random.Random(0))
    answer = _ask(model, tokenizer, [*history, {"role": "user", "content": "What happens when a worker dies?"}])
    assert "another worker" in answer
