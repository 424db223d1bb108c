"""Whose certificates a worker believes."""

from pathlib import Path

import certifi
import pytest

from pool_worker.certificates import authorities

made = authorities.__wrapped__  # as a process makes them once
END = "-----END CERTIFICATE-----\n"


def test_an_operators_own_authority_is_the_only_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(certifi.contents().partition(END)[0] + END)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert len(made().get_ca_certs()) == 1


def test_else_those_of_certifi_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    assert len(made().get_ca_certs()) == certifi.contents().count(END)
