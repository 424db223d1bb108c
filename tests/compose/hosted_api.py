"""Stands in for a hosted API: answers each chat with the same words, streamed. Run by Python alone, in a container."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8000
WORDS = ["A", " spillway", " carries", " the", " surplus", "."]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer each question about the API itself with nothing."""
        self._head(200, "application/json", 2)
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        """Stream an answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != "Bearer YOUR_KEY":
            self._head(401, "application/json", 2)
            self.wfile.write(b"{}")
            return
        sys.stdout.write(f"asked for {asked['model']}\n")
        sys.stdout.flush()
        deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in WORDS)]
        events = [self._chunk(asked, [{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
        events.append(self._chunk(asked, [{"index": 0, "delta": {}, "finish_reason": "stop"}]))
        usage = {"prompt_tokens": 5, "completion_tokens": len(WORDS), "total_tokens": 5 + len(WORDS)}
        events.append({**self._chunk(asked, []), "usage": usage})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._head(200, "text/event-stream", len(body))
        self.wfile.write(body.encode())

    def _chunk(self, asked: dict[str, object], choices: list[dict[str, object]]) -> dict[str, object]:
        kind = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
        return {**kind, "model": asked["model"], "choices": choices}

    def _head(self, status: int, content_type: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(length))
        self.end_headers()


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", PORT), Handler).serve_forever()
