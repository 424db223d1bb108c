"""The error for a missing extra."""

import sys
from pathlib import Path

import pytest

from gateway.batches.storage.registry import open_storage
from gateway.settings import BatchSettings, S3Settings
from protocol.distribution import MissingExtra, install_command, version


def test_the_installed_version_is_known() -> None:
    assert version().split(".")[0].isdigit()


def test_a_bucket_without_its_extra_names_the_key_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "gateway.batches.storage.s3", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra) as refused:
        open_storage(BatchSettings(s3=S3Settings(bucket="b")), tmp_path)
    assert str(refused.value) == f"batches.s3: requires the extra 's3': {install_command('s3')}"
    assert install_command("s3") == "pip install 'spillway-gateway[s3]'"
