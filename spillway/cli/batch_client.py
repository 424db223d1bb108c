"""A client of ``/v1/files`` and ``/v1/batches``: of this gateway, or of any other that has OpenAI's batches."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from protocol.http_client import httpx
from protocol.process import backoff_s

LONGEST_BACKOFF_S: Final = 10.0
PATIENCE_S: Final = 5.0  # with a gateway that does not answer, while somebody waits for the command
LONG_PATIENCE_S: Final = 900.0  # while a batch runs: a restart of everything is no reason to give up
LIMITS: Final = httpx.Timeout(60.0, connect=10.0)
ANSWER_OF_UPLOAD_S: Final = 600.0  # what was uploaded is made safe first
PAGE_ROWS: Final = 100
UPLOADS: Final = 5  # tries of one upload or download
MAY_WORK_LATER: Final = frozenset({408, 429, 500, 502, 503, 504})

Told = Callable[[int], None]  # of bytes so far


class BatchApiError(Exception):
    """The gateway refuses, or cannot be reached."""


class _Counted:
    """A file that tells how much of it has been read."""

    def __init__(self, file: BinaryIO, tell: Told) -> None:
        self._file = file
        self._tell = tell
        self.fileno = file.fileno  # by which its size is known before

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._tell(self._file.tell())
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class BatchClient:
    """Methods raise BatchApiError, whose text says what is wrong. A context manager."""

    def __init__(self, base_url: str, api_key: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"},
            timeout=LIMITS,
            follow_redirects=True,
            transport=transport,
        )
        self.patience_s = PATIENCE_S
        self.on_trouble: Callable[[str], None] = lambda _why: None  # told of what will be tried again

    def __enter__(self) -> Self:
        """Open it."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close its connections."""
        self._http.close()

    # --- files --------------------------------------------------------------------------------------------------------

    def upload(self, path: Path, name: str, tell: Told) -> str:
        """Upload a file for a batch, as it is read; return its id."""
        limits = httpx.Timeout(60.0, connect=10.0, read=ANSWER_OF_UPLOAD_S)

        def once() -> httpx.Response:
            with path.open("rb") as file:
                parts = {"file": (name, _Counted(file, tell), "application/jsonl")}
                return self._http.post("/v1/files", data={"purpose": "batch"}, files=parts, timeout=limits)  # type: ignore[arg-type]

        return str(self._object(once, tries=UPLOADS)["id"])

    def download(self, file_id: str, path: Path, tell: Callable[[int, int | None], None]) -> None:
        """Write a file's content to a new file: whole, or not at all. ``tell``: of bytes so far, and of all."""
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
                        tell(size, None if length is None else int(length))
                return answer

        try:
            self._patiently(once, tries=UPLOADS)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    # --- batches ------------------------------------------------------------------------------------------------------

    def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        """Create a batch of a file that none has been made of: one, also where the answer is lost."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        has_tried = False

        def once() -> httpx.Response:
            nonlocal has_tried
            made = (
                [one["id"] for one in self.batches(PAGE_ROWS) if one["input_file_id"] == file_id] if has_tried else []
            )
            has_tried = True
            return self._http.get(f"/v1/batches/{made[0]}") if made else self._http.post("/v1/batches", json=body)

        return self._object(once)

    def retrieve(self, batch_id: str) -> dict[str, Any]:
        """Return a batch."""
        return self._object(lambda: self._http.get(f"/v1/batches/{batch_id}"))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; return it."""
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
        answer = self._patiently(once, tries)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BatchApiError(f"{answer.request.url} is no API like OpenAI's: {answer.text[:100]!r}")
        return found

    def _patiently(self, once: Callable[[], httpx.Response], tries: int | None = None) -> httpx.Response:
        """Try until it works, cannot work, or for as long as there is patience."""
        began_s = time.monotonic()
        for number, backoff in enumerate(backoff_s(LONGEST_BACKOFF_S), start=1):
            wait_s = backoff
            try:
                answer = once()
            except httpx.TransportError as error:
                trouble = f"{self.url} does not answer: {str(error) or type(error).__name__}"
            except OSError as error:
                raise BatchApiError(f"{error.filename}: {error.strerror}") from error
            else:
                if answer.is_success:
                    return answer
                trouble = _reason(answer)
                if answer.status_code not in MAY_WORK_LATER or answer.headers.get("x-should-retry") == "false":
                    raise BatchApiError(trouble)
                wait_s = max(wait_s, _told_wait_s(answer))
            if number == tries or time.monotonic() + wait_s - began_s > self.patience_s:
                raise BatchApiError(trouble)
            self.on_trouble(trouble)
            time.sleep(wait_s)
        raise AssertionError("unreachable")


def _told_wait_s(answer: httpx.Response) -> float:
    try:
        return min(60.0, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return 0.0


def _reason(answer: httpx.Response) -> str:
    """Return what an error answer says, as an API that is like OpenAI's has it."""
    try:
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        code = None if isinstance(error, str) else error.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = answer.text.strip()[:300] or answer.reason_phrase, None
    return f"{answer.status_code}{f' {code}' if code else ''}: {message}"
