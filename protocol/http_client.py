"""httpx, for every part that calls a server: one place to change when it is replaced (docs/adr/0025)."""

import httpx

__all__ = ["httpx"]
