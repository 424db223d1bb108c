"""Settings of files and batches."""

from typing import Annotated

from pydantic import Field, SecretStr

from protocol.settings import HttpUrlText, PositiveInt, PositiveSeconds, Settings


class S3Settings(Settings):
    """A bucket of Amazon S3, or of anything that speaks its API. What is None here AWS's own variables may say."""

    bucket: str
    prefix: str = ""  # of all names in it
    endpoint: HttpUrlText | None = None  # None: Amazon's
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None


class BatchSettings(Settings):
    """``[batches]``: where files are kept, for how long, and how much of the fleet batches may ask for."""

    s3: S3Settings | None = None  # None: the folder "files" below the data folder, which all gateways must share
    file_ttl_s: PositiveSeconds = 30 * 24 * 3600.0  # of every file, results included; a client may ask for less
    max_file_bytes: PositiveInt = 2 * 1024**3
    max_tenant_bytes: PositiveInt = 50 * 1024**3  # of a team's files together; its batches' results may exceed it
    max_tenant_files: PositiveInt = 10_000
    # At a time, of one gateway; more are told to come again. A tenant may have as many as it leaves free.
    max_uploads: PositiveInt = 16
    upload_silence_s: PositiveSeconds = 30.0  # between two parts of an upload
    # So much must come on the average of each window, not counting the time that the gateway itself takes.
    upload_min_bytes_per_s: PositiveInt = 4096
    upload_pace_s: PositiveSeconds = 30.0  # the window
    upload_s: PositiveSeconds = 3600.0
    max_lines: PositiveInt = 1_000_000  # of one batch
    max_line_bytes: PositiveInt = 4 * 1024**2
    max_tenant_batches: PositiveInt = 100  # that are not over yet
    max_running: PositiveInt = 8  # batches that one gateway feeds at a time
    max_open_lines: PositiveInt = 256  # of all of them together
    max_line_tries: PositiveInt = 4  # of a line that fails; refusals for want of room do not count
    max_message_batch_bytes: PositiveInt = 256 * 1024**2  # the body of POST /v1/messages/batches: all of its requests
    max_message_batch_requests: PositiveInt = 100_000
    lease_s: Annotated[float, Field(ge=0.5, le=600)] = 15.0  # a gateway that is gone for longer loses its batches
    commit_s: PositiveSeconds = 2.0  # how old a result may get in memory: a crash costs so much work
    poll_s: PositiveSeconds = 1.0  # between two looks for work to take
    grace_s: PositiveSeconds = 10.0  # for the index, or open lines, of a batch that was stopped to end
    retry_s: PositiveSeconds = 5.0  # after a run that failed; one that fails in the same way three times is given up
