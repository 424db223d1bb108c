"""File storage in an S3 bucket: Amazon S3 or a compatible service such as MinIO, Ceph, or R2 (extra ``s3``)."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from gateway.batches.storage.base import StorageError, Writer
from gateway.settings import S3Settings

if TYPE_CHECKING:
    from obstore.store import S3Config

UPLOAD_PART_BYTES: Final = 8 * 1024 * 1024  # part of a multipart upload, in memory; smaller files use one PUT
UPLOAD_PARTS_AT_A_TIME: Final = 2
READ_BYTES: Final = 1024 * 1024  # per request: a long response would exceed the time limit of a call
CALL_LIMIT: Final = timedelta(seconds=60)
RETRY_LIMIT: Final = timedelta(seconds=20)


class _S3Writer:
    def __init__(self, file: "obstore.AsyncWritableFile") -> None:
        self._file = file

    async def write(self, data: bytes) -> None:
        with _errors_mapped():
            await self._file.write(data)


class S3Storage:
    """``Storage`` in a bucket."""

    def __init__(self, settings: S3Settings) -> None:
        config: S3Config = {}
        if settings.endpoint is not None:
            config["endpoint"] = settings.endpoint
        if settings.region is not None:
            config["region"] = settings.region
        if settings.access_key_id is not None and settings.secret_access_key is not None:
            config["access_key_id"] = settings.access_key_id.get_secret_value()
            config["secret_access_key"] = settings.secret_access_key.get_secret_value()
        is_plain = settings.endpoint is not None and settings.endpoint.startswith("http://")
        self._store = S3Store(
            settings.bucket,
            prefix=settings.prefix or None,
            config=config,
            client_options={"allow_http": is_plain, "timeout": CALL_LIMIT},
            retry_config={"max_retries": 5, "retry_timeout": RETRY_LIMIT},
        )

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[Writer]:
        """Write a new file; it appears only after it is closed."""
        file = obstore.open_writer_async(
            self._store, name, buffer_size=UPLOAD_PART_BYTES, max_concurrency=UPLOAD_PARTS_AT_A_TIME
        )
        yield _S3Writer(file)
        with _errors_mapped():
            await file.close()

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Iterate over a file's bytes."""
        with _errors_mapped():
            size = (await obstore.head_async(self._store, name))["size"]
        for start in range(0, size, READ_BYTES):
            with _errors_mapped():
                part = await obstore.get_range_async(self._store, name, start=start, end=min(size, start + READ_BYTES))
            yield bytes(part)

    async def delete(self, name: str) -> None:
        """Delete a file."""
        with _errors_mapped():
            try:
                await obstore.delete_async(self._store, name)
            except FileNotFoundError:
                return

    async def names(self, prefix: str) -> list[str]:
        """List the files below a folder."""
        with _errors_mapped():
            return sorted([meta["path"] async for page in obstore.list(self._store, prefix) for meta in page])


@contextmanager
def _errors_mapped() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(f"the bucket cannot be used: {error}") from error
