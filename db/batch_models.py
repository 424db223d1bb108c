"""Tables of files and batches."""

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from db.models import Base


class FileRow(Base):
    """A file: there whole, or still coming in. Its bytes are in its parts, one after another."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "tenant", "created_unix_ms"), Index(None, "expires_unix_ms"))

    id: Mapped[str] = mapped_column(primary_key=True)  # "file-…"
    tenant: Mapped[str]  # db.accounts.principal.Principal.tenant: who sees it
    key_id: Mapped[str]  # ApiKeyRow.id, of whoever made it
    created_unix_ms: Mapped[int]
    expires_unix_ms: Mapped[int]  # deleted soon after
    purpose: Mapped[str]  # "batch": what a client uploaded; "batch_output"; "uploading": its bytes are still coming
    filename: Mapped[str]
    size_bytes: Mapped[int]


class FilePartRow(Base):
    """A part of a file's bytes, with the lines of a batch that it answers: both are committed together, or neither.

    Parts of a batch's results are there before their file is.
    """

    __tablename__ = "file_parts"

    file_id: Mapped[str] = mapped_column(primary_key=True)  # FileRow.id, now or later
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    object_name: Mapped[str]  # in the storage (gateway.batches.storage)
    size_bytes: Mapped[int]
    lines: Mapped[bytes | None]  # numbers of lines (gateway.batches.lines); NULL: not of a batch's results


class BatchRow(Base):
    """A batch, from its creation on; times are NULL until it has got there."""

    __tablename__ = "batches"
    __table_args__ = (Index(None, "tenant", "created_unix_ms"), Index(None, "created_unix_ms"), Index(None, "status"))

    id: Mapped[str] = mapped_column(primary_key=True)  # "batch_…"
    surface: Mapped[str]  # "openai" | "anthropic": whose API made it
    tenant: Mapped[str]  # who sees it
    team_id: Mapped[str]  # TeamRow.id: whose webhooks tell of it
    key_id: Mapped[str]  # ApiKeyRow.id: whose requests its lines are
    key_name: Mapped[str]
    endpoint: Mapped[str]  # a path, such as "/v1/chat/completions"
    input_file_id: Mapped[str]  # FileRow.id
    output_file_id: Mapped[str | None]  # FileRow.id; NULL: no answers, or not over yet
    error_file_id: Mapped[str | None]  # likewise, of what failed
    completion_window: Mapped[str]
    custom_metadata: Mapped[str | None]  # JSON: the client's own
    result_ttl_s: Mapped[int | None]  # how long its results are kept; NULL: as all files
    status: Mapped[str]  # gateway.batches.states.Status
    errors: Mapped[str | None]  # JSON: why it failed (gateway.batches.validation.LineError)
    created_unix_ms: Mapped[int]
    expires_unix_ms: Mapped[int]  # what is not done by then is given up
    in_progress_unix_ms: Mapped[int | None]
    finalizing_unix_ms: Mapped[int | None]
    cancelling_unix_ms: Mapped[int | None]
    over_unix_ms: Mapped[int | None]  # completed, failed, expired or cancelled
    total: Mapped[int]  # lines; 0 until they are counted
    completed: Mapped[int]  # of these: answered
    failed: Mapped[int]  # of these: in the error file
    given_up: Mapped[int] = mapped_column(server_default="0")  # of the failed: cancelled, or not done in time
    prompt_tokens: Mapped[int]  # of what was answered
    cached_tokens: Mapped[int]  # a part of prompt tokens
    completion_tokens: Mapped[int]
    models: Mapped[str | None]  # JSON: by configured model, (lines, tokens as estimated); NULL until they are counted
    epoch: Mapped[int]  # how often a gateway has taken it: commits of an earlier holder are refused
    holder: Mapped[str | None]  # gateway id of the latest
