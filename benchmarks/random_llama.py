"""Llamas with random float32 weights, made on the fly with a fixed seed: speed does not depend on the values."""

from itertools import islice, product
from pathlib import Path
from string import ascii_letters
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED: Final = 20
VOCAB_SIZE: Final = 32_000
SIZES: Final[dict[str, dict[str, Any]]] = {
    "68M": {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8},
    "125M": {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12},
}


def make_model(size: str) -> LlamaForCausalLM:
    """Make one of SIZES: 12 layers, 4 key-value heads, 2,048 tokens of context, no end token."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        **SIZES[size],
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def empty_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer without text; prompts are token ids."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def save_model(size: str, folder: Path) -> int:
    """Write a model folder that every system can load; return its number of parameters."""
    model = make_model(size)
    model.save_pretrained(folder)
    empty_tokenizer().save_pretrained(folder)
    return int(model.num_parameters())


def byte_level_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most 143,364 tokens of one to three letters, as fast as real ones."""
    words = ("".join(letters) for length in (1, 2, 3) for letters in product(ascii_letters, repeat=length))
    tokenizer = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(islice(words, vocab_size))}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
