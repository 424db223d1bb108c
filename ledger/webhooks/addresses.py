"""Allowed destinations of deliveries: public addresses, and the networks that the operator allows.

A team can set any URL, and the ledger runs inside the operator's network, so it must not send to internal addresses
(server-side request forgery). The name is resolved once, all its addresses are checked, and the connection goes to one
of the checked addresses: a DNS answer that changes in between has no effect.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

from ledger.webhooks import slack
from ledger.webhooks.settings import WebhookSettings

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
LookUp = Callable[[str, int], list[str]]  # of host and port; raises OSError and UnicodeError

MAX_URL_CHARS: Final = 2048
MAX_ADDRESSES: Final = 16  # that a name may have
# Networks that are not public although Python's ``ipaddress`` may call them global: IANA's special-purpose networks, of
# which its releases know more or less, and the wire server of Azure's machines.
_SPECIAL: Final[tuple[Network, ...]] = (
    *map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")),
    *map(IPv6Network, ("64:ff9b:1::/48", "100::/64", "2001::/23", "3fff::/20", "5f00::/16")),
)
_NAT64: Final = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_IPV4_COMPATIBLE: Final = IPv6Network("::/96")  # RFC 4291, deprecated: likewise


class BadUrl(ValueError):
    """The URL is not valid for an endpoint; the message says why."""


class AddressRefused(Exception):
    """The URL's host is not allowed or cannot be resolved; the message says why."""


def checked_url(url: str, settings: WebhookSettings) -> str:
    """Return the URL if it is valid for an endpoint. Raises BadUrl. Names are resolved at each delivery, not here."""
    if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
        raise BadUrl(f"must have at most {MAX_URL_CHARS} printable ASCII characters and no spaces")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise BadUrl(f"is not a URL: {error}") from error
    if parts.scheme not in {"https", "http"} or not host:
        raise BadUrl("must be an https URL")
    if parts.scheme == "http" and not settings.allow_http:
        raise BadUrl("must use https. To allow http, set webhooks.allow_http")
    if "@" in parts.netloc or parts.fragment not in {"", slack.FRAGMENT}:
        raise BadUrl("must not contain a user, a password or a fragment")
    try:
        literal = ip_address(host)
    except ValueError:
        return url
    if not is_allowed(literal, settings.allowed_networks):
        raise BadUrl(f"{host} is not a public address. To allow it, use webhooks.allowed_networks")
    return url


def is_allowed(address: Address, allowed: Iterable[Network]) -> bool:
    """Return whether an address, or the IPv4 address inside it, is public or in an allowed network."""
    address = _innermost(address)
    return any(address in network for network in allowed) or _is_public(address)


def _innermost(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address (NAT64, 6to4, Teredo, mapped), or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or (address in _IPV4_COMPATIBLE and int(address) > 1):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: Address) -> bool:
    special = (
        address.is_private,
        address.is_loopback,
        address.is_link_local,
        address.is_multicast,
        address.is_reserved,
        address.is_unspecified,
        isinstance(address, IPv6Address) and address.is_site_local,
        any(address in network for network in _SPECIAL),
    )
    return address.is_global and not any(special)


def look_up(host: str, port: int) -> list[str]:
    """Resolve a host with the system's resolver. Raises OSError and UnicodeError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Resolver:
    """Resolves names in separate threads, so that a slow DNS server delays nothing else."""

    def __init__(self, settings: WebhookSettings, look_up: LookUp) -> None:
        self._look_up = look_up
        self._allowed = settings.allowed_networks
        self._threads = ThreadPoolExecutor(settings.in_flight, thread_name_prefix="webhook-names")

    def close(self) -> None:
        """Forget what is still being looked up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def addresses(self, url: str) -> tuple[SplitResult, list[Address]]:
        """Return the parts of a URL and the addresses of its host. Raises AddressRefused if any must not be sent to."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, host, port)
        except (OSError, UnicodeError) as error:
            raise AddressRefused(f"{host} has no address: {getattr(error, 'strerror', None) or error}") from error
        # "fe80::1%eth0": the zone is of no use here.
        addresses = list(dict.fromkeys(ip_address(text.partition("%")[0]) for text in found))[:MAX_ADDRESSES]
        refused = [address for address in addresses if not is_allowed(address, self._allowed)]
        if refused or not addresses:
            raise AddressRefused(f"{host} is {refused[0]}, which is not public" if refused else f"{host}: no address")
        return parts, addresses
