"""The certificate authorities that workers trust for HTTPS."""

import ssl
from functools import cache

from protocol.http_client import httpx


@cache
def authorities() -> ssl.SSLContext:
    """Return the authorities of SSL_CERT_FILE or SSL_CERT_DIR, else certifi's. Cached: loading takes 40 ms."""
    return httpx.create_ssl_context()
