"""A client of ``/v1/files`` and ``/v1/batches`` for Spillway or any other server with OpenAI's batch API."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from protocol.http_client import httpx
from protocol.process import backoff_s

LONGEST_BACKOFF_S: Final = 10.0
RETRY_LIMIT_S: Final = 5.0  # short: the user is waiting for the command
LONG_RETRY_LIMIT_S: Final = 900.0  # while waiting for a batch: outlasts a restart of the whole installation
LIMITS: Final = httpx.Timeout(60.0, connect=10.0)
UPLOAD_ANSWER_LIMIT_S: Final = 600.0  # the gateway stores the file before it answers
PAGE_ROWS: Final = 100
TRANSFER_TRIES: Final = 5  # of one upload or download
RETRYABLE_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})

OnProgress = Callable[[int], None]  # called with the bytes so far


class BatchApiError(Exception):
    """The gateway rejects the request or cannot be reached."""


class _Counted:
    """A file that reports how much of it has been read."""

    def __init__(self, file: BinaryIO, on_progress: OnProgress) -> None:
        self._file = file
        self._on_progress = on_progress
        self.fileno = file.fileno  # httpx reads the file's size from it

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_progress(self._file.tell())
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class BatchClient:
    """A client of one gateway. Methods raise BatchApiError with the reason. A context manager."""

    def __init__(self, base_url: str, api_key: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"},
            timeout=LIMITS,
            follow_redirects=True,
            transport=transport,
        )
        self.retry_limit_s = RETRY_LIMIT_S
        self.on_retry: Callable[[str], None] = lambda _why: None  # called with the reason before each retry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close its connections."""
        self._http.close()

    # --- files --------------------------------------------------------------------------------------------------------

    def upload(self, path: Path, name: str, on_progress: OnProgress) -> str:
        """Stream a file for a batch to the gateway; return its id."""
        limits = httpx.Timeout(60.0, connect=10.0, read=UPLOAD_ANSWER_LIMIT_S)

        def once() -> httpx.Response:
            with path.open("rb") as file:
                parts = {"file": (name, _Counted(file, on_progress), "application/jsonl")}
                return self._http.post("/v1/files", data={"purpose": "batch"}, files=parts, timeout=limits)  # type: ignore[arg-type]

        return str(self._object(once, tries=TRANSFER_TRIES)["id"])

    def download(self, file_id: str, path: Path, on_progress: Callable[[int, int | None], None]) -> None:
        """Write a file's content to a new file, atomically. ``on_progress`` gets the bytes so far and in total."""
        unfinished = path.with_name(path.name + ".part")

        def once() -> httpx.Response:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
                if answer.is_error:
                    answer.read()
                    return answer
                size, length = 0, answer.headers.get("content-length")
                with unfinished.open("wb") as file:
                    for chunk in answer.iter_bytes():
                        size += file.write(chunk)
                        on_progress(size, None if length is None else int(length))
                return answer

        try:
            self._retry(once, tries=TRANSFER_TRIES)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    # --- batches ------------------------------------------------------------------------------------------------------

    def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        """Create a batch from a new file. A retry after a lost answer does not create a second batch."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        has_tried = False

        def once() -> httpx.Response:
            nonlocal has_tried
            found = (
                [one["id"] for one in self.batches(PAGE_ROWS) if one["input_file_id"] == file_id] if has_tried else []
            )
            has_tried = True
            return self._http.get(f"/v1/batches/{found[0]}") if found else self._http.post("/v1/batches", json=body)

        return self._object(once)

    def retrieve(self, batch_id: str) -> dict[str, Any]:
        return self._object(lambda: self._http.get(f"/v1/batches/{batch_id}"))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        return self._object(lambda: self._http.post(f"/v1/batches/{batch_id}/cancel"))

    def batches(self, most: int) -> Iterator[dict[str, Any]]:
        """Iterate over the newest batches."""
        after = None
        while most > 0:
            page = self._page(min(most, PAGE_ROWS), after)
            yield from page["data"]
            most -= len(page["data"])
            if not page["data"] or not page.get("has_more"):
                return
            after = page["data"][-1]["id"]

    def _page(self, limit: int, after: str | None) -> dict[str, Any]:
        params = {"limit": str(limit), **({} if after is None else {"after": after})}
        return self._object(lambda: self._http.get("/v1/batches", params=params))

    # --- retries ------------------------------------------------------------------------------------------------------

    def _object(self, once: Callable[[], httpx.Response], tries: int | None = None) -> dict[str, Any]:
        answer = self._retry(once, tries)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BatchApiError(f"{answer.request.url} is not an OpenAI-compatible API: {answer.text[:100]!r}")
        return found

    def _retry(self, once: Callable[[], httpx.Response], tries: int | None = None) -> httpx.Response:
        """Retry transient errors, up to ``tries`` times and for at most ``retry_limit_s``."""
        began_s = time.monotonic()
        for number, backoff in enumerate(backoff_s(LONGEST_BACKOFF_S), start=1):
            wait_s = backoff
            try:
                answer = once()
            except httpx.TransportError as error:
                reason = f"{self.url} does not answer: {str(error) or type(error).__name__}"
            except OSError as error:
                raise BatchApiError(f"{error.filename}: {error.strerror}") from error
            else:
                if answer.is_success:
                    return answer
                reason = _reason(answer)
                if answer.status_code not in RETRYABLE_STATUSES or answer.headers.get("x-should-retry") == "false":
                    raise BatchApiError(reason)
                wait_s = max(wait_s, _retry_after_s(answer))
            if number == tries or time.monotonic() + wait_s - began_s > self.retry_limit_s:
                raise BatchApiError(reason)
            self.on_retry(reason)
            time.sleep(wait_s)
        raise AssertionError("unreachable")


def _retry_after_s(answer: httpx.Response) -> float:
    try:
        return min(60.0, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return 0.0


def _reason(answer: httpx.Response) -> str:
    """Return the status, code and message of an error answer in OpenAI's format."""
    try:
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        code = None if isinstance(error, str) else error.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = answer.text.strip()[:300] or answer.reason_phrase, None
    return f"{answer.status_code}{f' {code}' if code else ''}: {message}"
