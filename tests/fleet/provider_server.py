"""What the stand-ins for providers' APIs share: real HTTP on loopback, state, answers that are lost."""

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # by names in lower case
    body: Any  # decoded JSON; None: there is none


class ProviderServer:
    """Answers calls one at a time. Used as a context manager; kinds of provider are subclasses."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.lose_changes = 0  # so many next changes are made, and the connection is closed instead of an answer
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                url = urlsplit(self.path)
                query = {name: values[-1] for name, values in parse_qs(url.query).items()}
                headers = {name.lower(): value for name, value in self.headers.items()}
                call = Call(self.command, url.path, query, headers, json.loads(content) if content else None)
                with owner._lock:
                    owner.calls.append(call)
                    status, body = owner.answer(call)
                    is_change = call.method != "GET" and "/availability/" not in call.path
                    is_lost = is_change and owner.lose_changes > 0
                    owner.lose_changes -= is_lost
                if is_lost:
                    self.close_connection = True
                    return
                text = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def answer(self, call: Call) -> tuple[int, Any]:
        """Return a status and a JSON body (None: no body)."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Answer nothing from now on; may be called twice."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
