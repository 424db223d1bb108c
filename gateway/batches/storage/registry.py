"""Which place files are kept in."""

from pathlib import Path
from typing import Final

from gateway.batches.storage.base import Storage
from gateway.batches.storage.local import LocalStorage
from gateway.settings import BatchSettings

FOLDER: Final = "files"  # below the data folder


def open_storage(settings: BatchSettings, data_dir: Path) -> Storage:
    """Return the place that is configured. Raises ImportError where it needs what is not installed."""
    if settings.s3 is None:
        return LocalStorage(data_dir / FOLDER)
    from gateway.batches.storage.s3 import S3Storage  # noqa: PLC0415  # only here: whoever needs no bucket needs no obstore

    return S3Storage(settings.s3)
