"""TLS between a client and a queue server with a certificate of a private authority."""

import datetime as dt
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protocol.errors import BusError
from protocol.nats.access import CredentialsError, access_options
from protocol.nats.bus import Bus
from tests.nats_server import NatsServer
from tests.waiting import HEALTHY_S


def make_certificate(folder: Path) -> None:
    """Write a certificate of 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[NatsServer]:
    make_certificate(tmp_path)
    server = NatsServer(tmp_path, f'tls {{ cert_file: "{tmp_path / "ca.pem"}", key_file: "{tmp_path / "key.pem"}" }}\n')
    server.start()
    yield server
    server.kill()


def tls_url(server: NatsServer) -> str:
    return server.url.replace("nats://", "tls://")


async def test_a_private_authority_is_believed_where_it_is_named(tls_server: NatsServer, tmp_path: Path) -> None:
    options = access_options(None, tmp_path / "ca.pem", "gateway")
    bus = await Bus.connect(tls_url(tls_server), name="test", options=options)
    assert (await bus.api("INFO"))["streams"] == 0
    await bus.close()
    with pytest.raises(BusError, match="CERTIFICATE_VERIFY_FAILED"):
        await Bus.connect(tls_url(tls_server), name="test", first_limit_s=HEALTHY_S)


async def test_a_tls_url_is_never_spoken_to_in_the_clear(nats_server: NatsServer) -> None:
    """Nor is who we are: somebody on the way may have taken out that the server asks for TLS."""
    with pytest.raises(BusError, match="offers no TLS"):
        await Bus.connect(tls_url(nats_server), name="test", first_limit_s=HEALTHY_S)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"nats\.ca_file: .*nothing"):
        access_options(None, tmp_path / "nothing.pem", "gateway")
    (tmp_path / "w.creds").write_text("-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n")
    for name, words in (("nothing.creds", "No such file"), ("w.creds", "not the credentials of a NATS user")):
        with pytest.raises(CredentialsError, match=words):
            access_options(tmp_path / name, None, "gateway")
