"""The salt of a tenant, which keeps its prompts apart from others' in workers' prefix caches."""

import hmac
from typing import Final

from pydantic import SecretStr

CACHE_SALT_BYTES: Final = 16


def cache_salt_of(tenant: str, pepper: SecretStr) -> str:
    """Return what keeps a tenant's prompts apart in workers' prefix caches.

    It is the same at all gateways and after a restart, and without the pepper it cannot be guessed. The label keeps it
    apart from the hashes of API keys, which are made with the same pepper.
    """
    label = f"prefix cache of {tenant}"
    return hmac.digest(pepper.get_secret_value().encode(), label.encode(), "sha256")[:CACHE_SALT_BYTES].hex()
