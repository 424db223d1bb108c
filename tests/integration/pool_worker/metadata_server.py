"""A provider's metadata server on loopback: real HTTP, scripted answers, and a list of the requests."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Question:
    method: str
    target: str  # path and query
    headers: Mapping[str, str]  # lower-case names
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class MetadataServer:
    """Answers by method and path; 404 for anything not scripted. A context manager."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}  # "GET /path" → answer
        self.questions: list[Question] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                owner.questions.append(Question(self.command, self.path, headers, body))
                answer = owner.answers.get(f"{self.command} {urlsplit(self.path).path}", Answer(404))
                content = answer.body.encode()
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(content)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = _answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def asked(self, method: str, path: str) -> list[Question]:
        return [q for q in self.questions if q.method == method and urlsplit(q.target).path == path]
