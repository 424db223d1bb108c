"""Where deliveries may go."""

from ipaddress import ip_address

import pytest

from ledger.webhooks.addresses import AddressRefused, BadUrl, Resolver, checked_url, is_allowed
from ledger.webhooks.settings import WebhookSettings

PUBLIC_ONLY = WebhookSettings()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",  # shared by carriers
        "100.100.100.200",  # metadata at Alibaba
        "169.254.169.254",  # metadata at most others
        "168.63.129.16",  # the wire server at Azure
        "192.0.0.192",  # metadata at Oracle
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",  # 127.0.0.1 behind NAT64
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",  # 127.0.0.1 by 6to4
        "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",  # 127.0.0.1 by Teredo
        "fc00::1",
        "fd00:ec2::254",  # metadata at AWS
        "fe80::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "64:ff9b:1::1",  # NAT64 of one's own
        "3fff::1",
        "2001:2::1",
        "5f00::1",
    ],
)
def test_what_is_not_public_is_refused(address: str) -> None:
    assert not is_allowed(ip_address(address), ())


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_what_is_public_is_not(address: str) -> None:
    assert is_allowed(ip_address(address), ())


def test_an_operator_may_allow_networks_of_their_own() -> None:
    settings = WebhookSettings.model_validate({"allowed_networks": ["10.1.0.0/16", "fd00:1::/32"]})
    allowed = settings.allowed_networks
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00:1::5"):
        assert is_allowed(ip_address(address), allowed)
    for address in ("10.2.0.1", "fd00:2::1", "127.0.0.1"):
        assert not is_allowed(ip_address(address), allowed)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://example.com/hook", "must use https"),
        ("ftp://example.com/", "must be an https URL"),
        ("example.com/hook", "must be an https URL"),
        ("https:///hook", "must be an https URL"),
        ("https://user:secret@example.com/", "must not contain a user, a password or a fragment"),
        ("https://example.com/#part", "must not contain a user, a password or a fragment"),
        ("https://example.com:99999/", "is not a URL"),
        ("https://exa mple.com/", "printable ASCII"),
        ("https://example.com/\r\nx: y", "printable ASCII"),
        ("https://exämple.com/", "printable ASCII"),
        ("https://example.com/" + "x" * 2048, "at most 2048"),
        ("https://10.0.0.1/", "not a public address"),
        ("https://[::ffff:127.0.0.1]/", "not a public address"),
        ("https://[fe80::1%25eth0]/", "not a public address|is not a URL"),
    ],
)
def test_urls_that_cannot_be_an_endpoints(url: str, problem: str) -> None:
    with pytest.raises(BadUrl, match=problem):
        checked_url(url, PUBLIC_ONLY)


def test_urls_that_can() -> None:
    for url in (
        "https://example.com",
        "https://example.com:8443/a?b=c",
        "https://1.1.1.1/",
        "https://[2606:4700::1]/x",
    ):
        assert checked_url(url, PUBLIC_ONLY) == url
    assert checked_url("http://example.com/", WebhookSettings(allow_http=True)) == "http://example.com/"


async def resolved(settings: WebhookSettings, url: str, *addresses: str) -> list[str]:
    resolver = Resolver(settings, lambda _host, _port: list(addresses))
    try:
        return [str(address) for address in (await resolver.addresses(url))[1]]
    finally:
        resolver.close()


async def test_all_addresses_of_a_name_must_be_allowed() -> None:
    url = "https://hooks.example.com/"
    assert await resolved(PUBLIC_ONLY, url, "1.1.1.1", "2606:4700::1", "1.1.1.1") == ["1.1.1.1", "2606:4700::1"]
    for inside in ("10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "169.254.169.254"):
        with pytest.raises(AddressRefused, match="which is not public"):
            await resolved(PUBLIC_ONLY, url, "1.1.1.1", inside)
    with pytest.raises(AddressRefused, match="no address"):
        await resolved(PUBLIC_ONLY, url)


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1"])
async def test_other_spellings_of_loopback_are_judged_by_what_the_system_makes_of_them(host: str) -> None:
    """No fake here: the system's own resolver reads all of these as 127.0.0.1."""
    from ledger.webhooks.addresses import look_up

    resolver = Resolver(PUBLIC_ONLY, look_up)
    try:
        with pytest.raises(AddressRefused):
            await resolver.addresses(f"https://{host}/")
    finally:
        resolver.close()
