"""Finds a model's weight files and computes its revision, so that equal revisions mean equal weights.

Only safetensors are read: a pickle (``pytorch_model.bin``) can run arbitrary code. A revision is the digest of
everything that determines a model's answers: the bytes of the weights, the configurations and the dtype. Two pools of
one revision may resume each other's answers.
"""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from engine.errors import UnsupportedModel

SAFE_NAME: Final = "model.safetensors"
SAFE_INDEX_NAME: Final = "model.safetensors.index.json"
PICKLE_NAMES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_PICKLE_NAMES: Final = ("adapter_model.bin",)
CONFIG_NAMES: Final = ("config.json", "generation_config.json")  # the second lists the tokens that end an answer
# Configuration keys that identify the writer, not the model.
_NO_MEANING: Final = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
REVISION_CHARS: Final = 16
HASHING_THREADS: Final = 4  # SHA-256 takes a second for 1 to 2 GB; loading reads the files anyway


def optional_file(name: str, file_name: str) -> Path | None:
    """Return a file of a model folder, or of a name on the hub; None if it does not exist."""
    found = cached_file(name, file_name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def weight_files(name: str) -> list[Path]:
    """Return the files that hold a model's weights. Raises UnsupportedModel if they are not safetensors."""
    if (index := optional_file(name, SAFE_INDEX_NAME)) is not None:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [path for shard in shards if (path := optional_file(name, shard)) is not None]
    refuse_pickles(name, PICKLE_NAMES, unless=SAFE_NAME)
    if (whole := optional_file(name, SAFE_NAME)) is not None:
        return [whole]
    raise UnsupportedModel(f"{name} has neither {SAFE_NAME} nor {SAFE_INDEX_NAME}")


def check_whole(files: Iterable[Path]) -> None:
    """Raise UnsupportedModel, naming the file, if one is damaged or truncated. Reads headers only."""
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            size = path.stat().st_size
            raise UnsupportedModel(
                f"{path} is damaged or truncated ({size:,} bytes; {error}): copy or download it again"
            ) from error


def refuse_pickles(name: str, file_names: Iterable[str], *, unless: str) -> None:
    """Raise UnsupportedModel, naming the file, if the weights are in a format that can run code.

    ``unless``: the check passes if this file exists, because it is read instead.
    """
    if optional_file(name, unless) is not None:
        return
    for file_name in file_names:
        if optional_file(name, file_name) is not None:
            raise UnsupportedModel(
                f"{name} has its weights in {file_name}, which can run arbitrary code. Only safetensors are "
                f"supported: convert it (safetensors.torch.save_file), or use a revision of the model that has them"
            )


def digest_of(*parts: str) -> str:
    """Return one short digest of all parts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:REVISION_CHARS]


class WeightsDigest:
    """The digest of a model's files, computed while they are loaded."""

    def __init__(self, name: str) -> None:
        """Start in the background. Raises UnsupportedModel as ``weight_files`` does."""
        threads = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="weights-digest")
        self._files = [threads.submit(sha256_of, path) for path in weight_files(name)]
        self._configs = [_meaning(path) for file_name in CONFIG_NAMES if (path := optional_file(name, file_name))]
        threads.shutdown(wait=False)

    def result(self) -> str:
        """Wait for the digest and return it."""
        return digest_of(*self._configs, *(file.result() for file in self._files))


def sha256_of(path: Path) -> str:
    """Return a file's digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _meaning(path: Path) -> str:
    config = json.loads(path.read_text())
    return json.dumps({key: value for key, value in config.items() if key not in _NO_MEANING}, sort_keys=True)
