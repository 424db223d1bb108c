"""An authority of our own, and the certificates that it signs."""

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certified(folder: Path, *names: str) -> ssl.SSLContext:
    """Return the TLS of a server with the first of the names.

    In the folder, ``ca.pem`` is the authority's certificate, and ``NAME.pem`` a certificate and its key.
    """
    authority, issuer = ec.generate_private_key(ec.SECP256R1()), _named("test authority")
    ca = _signed(issuer, authority, issuer, authority, x509.BasicConstraints(ca=True, path_length=None))
    (folder / "ca.pem").write_bytes(ca)
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _signed(_named(name), key, issuer, authority, x509.SubjectAlternativeName([_general_name(name)]))
        (folder / f"{name}.pem").write_bytes(signed + private_bytes(key))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / f"{names[0]}.pem")
    return context


def private_bytes(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    """Return a private key as PEM."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> bytes:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(extension, critical=False)
        .sign(issuer_key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
