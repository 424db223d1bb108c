"""LoRA adapters as users make them, with PEFT, and merged into their model."""

import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import PeftModel


def write_adapter(model: PreTrainedModel, folder: Path, *, seed: int, **lora: Any) -> "PeftModel":
    """Write an adapter of random weights into `folder`; return PEFT's own model of it."""
    from peft import LoraConfig, get_peft_model  # takes a second

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's warnings about configurations that the tests intend
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**lora))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:  # as if trained: PEFT initializes B with zeros, which changes nothing
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(str(folder))
    return adapted


def make_adapter(model: PreTrainedModel, folder: Path, *, seed: int, **lora: Any) -> PreTrainedModel:
    """Write an adapter; return a copy of the model into which PEFT has merged it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = write_adapter(model, folder, seed=seed, **lora).merge_and_unload()
    assert isinstance(merged, PreTrainedModel)
    merged.eval()
    return merged


def generate(model: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """Return transformers' greedy answer, without end tokens."""
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
