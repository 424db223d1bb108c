"""The certificate authorities that a worker trusts."""

from pathlib import Path

import certifi
import pytest

from pool_worker.certificates import authorities

made = authorities.__wrapped__  # cached per process
END = "-----END CERTIFICATE-----\n"


def test_a_configured_authority_replaces_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(certifi.contents().partition(END)[0] + END)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert len(made().get_ca_certs()) == 1


def test_the_default_authorities_are_certifis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    assert len(made().get_ca_certs()) == certifi.contents().count(END)
