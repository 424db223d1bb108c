"""Selection of the configured file storage."""

from pathlib import Path
from typing import Final

from gateway.batches.storage.base import Storage
from gateway.batches.storage.local import LocalStorage
from gateway.settings import BatchSettings
from protocol.distribution import needing

FOLDER: Final = "files"  # subfolder of the data folder


def open_storage(settings: BatchSettings, data_dir: Path) -> Storage:
    """Return the configured storage. Raises MissingExtra if its dependencies are not installed."""
    if settings.s3 is None:
        return LocalStorage(data_dir / FOLDER)
    with needing("s3", key="batches.s3"):
        from gateway.batches.storage.s3 import S3Storage  # noqa: PLC0415 - brings obstore
    return S3Storage(settings.s3)
