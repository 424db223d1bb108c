"""Names for blocks of tokens that say everything their keys and values depend on. Imports no torch.

The keys and values of a token depend on it and on all tokens before it. So a block's key is the hash of its tokens and
of the key of the block before it, as in vLLM's prefix caching. The hash is cryptographic: with a weaker one, a caller
could craft a prompt that is answered from somebody else's.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 16


def extend_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append the keys of those whole blocks of `token_ids` that `keys` does not have yet."""
    for start in range(len(keys) * block_size, len(token_ids) - block_size + 1, block_size):
        digest = blake2b(keys[-1] if keys else b"", digest_size=KEY_BYTES)
        digest.update(array("I", token_ids[start : start + block_size]).tobytes())
        keys.append(digest.digest())
