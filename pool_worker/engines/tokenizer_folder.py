"""Loads a model's tokenizer from its files without transformers, for workers whose engine runs elsewhere.

Reads Hugging Face's tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from protocol.generation import GENERATION_CONFIG, sampling_defaults

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TokenizerFolderError(Exception):
    """The folder has no usable tokenizer."""


class TokenizerFolder:
    """A tokenizer with the interface that ``engine.text.detokenizer`` expects, and its facts for the model card."""

    clean_up_tokenization_spaces = False  # only tokenizers older than byte-level vocabularies change their text

    def __init__(self, path: Path) -> None:
        """Read a folder, or a tokenizer.json with the files beside it. Raises TokenizerFolderError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFolderError(f"cannot read {file}: {error}") from error
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        config = _json(file.parent / "tokenizer_config.json")
        self.special_tokens = {name: text for name in SPECIAL_TOKENS if (text := _content(config.get(name)))}
        special = (self.backend_tokenizer.token_to_id(text) for text in self.special_tokens.values())
        self.all_special_ids = [token_id for token_id in special if token_id is not None]
        self.chat_templates = _chat_templates(file.parent, config)
        generation = _json(file.parent / GENERATION_CONFIG)
        self.eos_ids = self._eos_ids(generation)
        self.sampling = sampling_defaults(generation)

    def __len__(self) -> int:
        """Return the size of the vocabulary, added tokens included."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's entries as written there."""
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _eos_ids(self, generation: dict[str, Any]) -> frozenset[int]:
        named = generation.get("eos_token_id")
        ids = [named] if isinstance(named, int) else list(named or ())
        own = self.backend_tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        return frozenset(ids if own is None else [*ids, own])


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a file beside the tokenizer; empty if there is none."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerFolderError(f"cannot read {path}: {error}") from error
    return content if isinstance(content, dict) else {}


def _content(token: object) -> str:
    """Return a special token's text, which older files wrap in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; one without a name is "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text()}
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    return {entry["name"]: entry["template"] for entry in template or ()}
