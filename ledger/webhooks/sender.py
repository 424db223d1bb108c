"""One attempt of a delivery: one POST to a checked address, within limits of time and bytes."""

import asyncio
import ipaddress
import re
import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import SplitResult

from ledger.webhooks.addresses import Address, AddressRefused, LookUp, Resolver, look_up
from ledger.webhooks.deliveries import Attempt
from ledger.webhooks.secrets import signatures
from ledger.webhooks.settings import WebhookSettings
from protocol.http_client import httpx

MAX_ANSWER_BYTES: Final = 16 * 1024  # read and discarded
MAX_RETRY_AFTER_S: Final = 24 * 3600.0
MAX_ADDRESSES_TRIED: Final = 4
_SECONDS: Final = re.compile(r"^[0-9]{1,9}$")


class Sender:
    """Sends signed bodies. Each attempt opens a new connection: an existing one may belong to another host name."""

    def __init__(self, settings: WebhookSettings, look_up: LookUp = look_up) -> None:
        """``look_up``: the resolver of names."""
        self._settings = settings
        self._resolver = Resolver(settings, look_up)
        self._tls = ssl.create_default_context()

    def close(self) -> None:
        """Stop resolving names."""
        self._resolver.close()

    async def send(self, url: str, secrets: Sequence[str], message_id: str, body: bytes) -> Attempt:
        """Send one body, signed with each of the secrets. Errors are returned in the result."""
        unix_s = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": "Spillway-Webhooks/1",
            "webhook-id": message_id,
            "webhook-timestamp": str(unix_s),
            "webhook-signature": signatures(secrets, message_id, unix_s, body),
        }
        try:
            async with asyncio.timeout(self._settings.total_s):
                parts, addresses = await self._resolver.addresses(url)
                return await self._post(parts, addresses, headers, body)
        except AddressRefused as error:
            return Attempt(error=str(error))
        except TimeoutError:
            return Attempt(error=f"no answer within {self._settings.total_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError, ValueError) as error:
            return Attempt(error=f"{type(error).__name__}: {error}"[:300])

    async def _post(
        self, parts: SplitResult, addresses: Sequence[Address], headers: dict[str, str], body: bytes
    ) -> Attempt:
        """Try the addresses until one accepts a connection."""
        tried = addresses[:MAX_ADDRESSES_TRIED]
        for address in tried[:-1]:
            try:
                return await self._post_to(parts, address, headers, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._post_to(parts, tried[-1], headers, body)

    async def _post_to(self, parts: SplitResult, address: Address, headers: dict[str, str], body: bytes) -> Attempt:
        host = parts.hostname or ""
        timeout = httpx.Timeout(self._settings.total_s, connect=self._settings.connect_s)
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
        async with httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client:
            request = client.build_request(
                "POST",
                _at(parts, address),
                headers={**headers, "host": parts.netloc},
                content=body,
                # The certificate is checked for this name, not for the address. TLS does not send addresses as names.
                extensions={} if _is_address(host) else {"sni_hostname": host},
            )
            response = await client.send(request, stream=True, follow_redirects=False)
            try:
                await _read_some(response)
            finally:
                await response.aclose()
        return _judged(response)


def _at(parts: SplitResult, address: Address) -> str:
    """Return the URL with the host replaced by the address."""
    shown = f"[{address}]" if address.version == 6 else str(address)
    port = "" if parts.port is None else f":{parts.port}"
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{shown}{port}{parts.path or '/'}{query}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _read_some(response: httpx.Response) -> None:
    """Read an answer without decompressing it, so that the connection ends cleanly; stop at the limit."""
    read = 0
    async for chunk in response.aiter_raw():
        read += len(chunk)
        if read > MAX_ANSWER_BYTES:
            return


def _judged(response: httpx.Response) -> Attempt:
    status = response.status_code
    if 200 <= status < 300:
        return Attempt(status)
    if 300 <= status < 400:
        return Attempt(status, f"answered {status}: redirects are not followed")
    return Attempt(status, f"answered {status}", _retry_after_s(response.headers.get("retry-after", "")))


def _retry_after_s(value: str) -> float:
    """Parse ``Retry-After``, a number or a date, into seconds; 0 if it is neither."""
    value = value.strip()
    if _SECONDS.match(value):
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        wait_s = parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)
