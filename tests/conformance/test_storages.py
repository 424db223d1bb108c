"""Requirements for every file storage: a folder, and a bucket of moto's server."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import certifi
import pytest

from gateway.batches.storage.base import Storage, StorageError
from gateway.batches.storage.registry import open_storage
from gateway.settings import BatchSettings, S3Settings

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Settings]:
    from moto.server import ThreadedMotoServer  # takes a second in each process that collects tests

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
    boto3.client("s3", endpoint_url=endpoint, region_name="eu-west-1", **keys).create_bucket(
        Bucket="files", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    yield S3Settings.model_validate(
        {"bucket": "files", "prefix": "spillway", "endpoint": endpoint, "region": "eu-west-1"}
        | {name.removeprefix("aws_"): value for name, value in keys.items()}
    )
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())  # tests have none, and reqwest needs some
    s3 = request.getfixturevalue("bucket") if request.param == "s3" else None
    return open_storage(BatchSettings(s3=s3), tmp_path)


async def content(storage: Storage, name: str) -> bytes:
    return b"".join([chunk async for chunk in storage.read(name)])


async def test_a_file_is_read_as_it_was_written(storage: Storage) -> None:
    async with storage.writing("file-1/0") as writer:
        await writer.write(b"first ")
        await writer.write(b"second")
    async with storage.writing("file-1/1"):
        pass
    assert (await content(storage, "file-1/0"), await content(storage, "file-1/1")) == (b"first second", b"")


async def test_a_large_file_is_read_in_small_pieces(storage: Storage) -> None:
    async with storage.writing("file-2/0") as writer:
        for number in range(18):  # more than one part of a multipart upload
            await writer.write(bytes([number]) * MIB)
    sizes = [len(chunk) async for chunk in storage.read("file-2/0")]
    assert (sum(sizes), max(sizes) <= MIB) == (18 * MIB, True)
    assert (await content(storage, "file-2/0"))[17 * MIB] == 17


async def test_an_unfinished_file_does_not_exist(storage: Storage) -> None:
    async def fail() -> None:
        async with storage.writing("file-3/0") as writer:
            await writer.write(b"x" * 9 * MIB)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert await storage.names("file-3/") == []
    with pytest.raises(StorageError):
        await content(storage, "file-3/0")


async def test_listed_names_belong_to_one_folder(storage: Storage) -> None:
    for name in ("file-4/0", "file-4/1-7", "file-44/0"):
        async with storage.writing(name) as writer:
            await writer.write(b"x")
    assert await storage.names("file-4/") == ["file-4/0", "file-4/1-7"]


async def test_a_deleted_file_is_gone_and_may_be_deleted_again(storage: Storage) -> None:
    async with storage.writing("file-5/0") as writer:
        await writer.write(b"x")
    await storage.delete("file-5/0")
    await storage.delete("file-5/0")
    assert await storage.names("file-5/") == []
    with pytest.raises(StorageError):
        await content(storage, "file-5/0")
