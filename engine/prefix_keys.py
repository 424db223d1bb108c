"""Keys for blocks of tokens that cover everything their keys and values depend on. Imports no torch.

The keys and values of a token depend on it, on all tokens before it, and on the adapter that computed them. So a
block's key is the hash of its tokens and of the key of the block before it, or for the first block of the adapter's
name, as in vLLM's prefix caching. The hash is cryptographic: with a weaker one, a client
could craft a prompt that is answered from another client's blocks.

A request's salt is hashed into its first block's key, so that only requests of the same salt find each other's blocks:
otherwise the count of cached tokens tells a client whether another one has sent the same prompt, block by block.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 16


def extend_keys(
    keys: list[bytes], token_ids: Sequence[int], block_size: int, adapter: str | None = None, cache_salt: str = ""
) -> None:
    """Append the keys of those whole blocks of `token_ids`, computed with `adapter`, that `keys` does not have yet."""
    for start in range(len(keys) * block_size, len(token_ids) - block_size + 1, block_size):
        digest = blake2b(keys[-1] if keys else _root(adapter, cache_salt), digest_size=KEY_BYTES)
        digest.update(array("I", token_ids[start : start + block_size]).tobytes())
        keys.append(digest.digest())


def _root(adapter: str | None, cache_salt: str) -> bytes:
    """Return the parent of the first block's key: another one for each adapter and each salt."""
    return blake2b(repr((adapter, cache_salt)).encode(), digest_size=KEY_BYTES).digest()
