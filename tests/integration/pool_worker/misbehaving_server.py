"""A server program that speaks vLLM's wire format around a hash, and misbehaves as its folder and options say.

    python misbehaving_server.py FOLDER PORT [--die-at-start] [--ignore-term] [--grandchild]

It appends to ``events`` in FOLDER: "started PID", "grandchild PID", "ended". It dies midstream if the file ``die``
exists (and deletes that), and answers nothing, not even health checks, while ``hang`` exists. A request for REFUSED
tokens gets a 400.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
TOKEN_S = 0.02
REFUSED = 13


def tell(event: str) -> None:
    with (FOLDER / "events").open("a") as events:
        events.write(f"{event}\n")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._hang()
        models = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 500}]}
        self._answer(json.dumps(models).encode() if self.path == "/v1/models" else b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["max_tokens"] == REFUSED:
            self._answer(b'{"error": {"message": "an unlucky number"}}', 400)
            return
        self.send_response(200)
        self.end_headers()
        ids = list(body["prompt"])
        for number in range(body["max_tokens"]):
            self._hang()
            if number == 3 and (FOLDER / "die").exists():
                (FOLDER / "die").unlink()
                say("CUDA error: out of memory")
                os._exit(9)
            time.sleep(TOKEN_S)
            ids.append(40 + hashlib.sha256(repr(ids[-4:]).encode()).digest()[0])
            reason = "length" if number + 1 == body["max_tokens"] else None
            choice = {"index": 0, "token_ids": ids[-1:], "finish_reason": reason, "logprobs": None}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    def _hang(self) -> None:
        while (FOLDER / "hang").exists():
            time.sleep(TOKEN_S)

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def end(*_: object) -> None:
    tell("ended")
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--ignore-term" in sys.argv else end)
    tell(f"started {os.getpid()}")
    if "--grandchild" in sys.argv:
        ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        tell(f"grandchild {subprocess.Popen([sys.executable, '-S', '-c', ignoring]).pid}")
    if "--die-at-start" in sys.argv:
        say("no such model: m")
        sys.exit(3)
    say("listening")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
