"""``spillway bench engine --url``: a running Spillway as its callers see it, and servers that know less."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from spillway.bench.endpoint import EndpointTarget
from spillway.bench.measure import BenchError, Load, LoadRefused
from spillway.cli import app
from tests.acceptance.system import System


def test_a_running_spillway(system: System) -> None:
    loads = ["--prompt-tokens", "100,100000", "--batch", "1,3", "--new-tokens", "5", "--rounds", "1"]
    where = ["--url", system.base_url, "--key", system.api_key, "--model", "scripted"]
    done = CliRunner().invoke(app, ["bench", "engine", *where, *loads, "--json", "-"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["environment"]["model"] == "scripted"
    assert [(row["prompt_tokens"], row["batch"]) for row in report["rows"]] == [(100, 1), (100, 3)]
    for row in report["rows"]:
        assert row["counted_prompt_tokens"] == pytest.approx(100, rel=0.1)
        assert row["counted_new_tokens"] == 5
        assert row["decode_s"] > 0
    assert [skipped["prompt_tokens"] for skipped in report["skipped"]] == [100_000, 100_000]


class Plain(BaseHTTPRequestHandler):
    """A server that refuses fields OpenAI does not have, counts words and answers two of the tokens asked for.

    Its events are written in each way that the format allows: with a space, without, and over several lines.
    """

    layouts = (
        lambda event: f"data: {json.dumps(event)}",
        lambda event: f"data:{json.dumps(event)}",
        lambda event: "\n".join(f"data: {line}" for line in json.dumps(event, indent=1).splitlines()),
    )

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "ignore_eos" in body:
            self._send(400, {"error": {"message": "Unknown parameter: 'ignore_eos'."}})
            return
        words = len(body["messages"][0]["content"].split())
        usage = {"prompt_tokens": words + 7, "completion_tokens": 2}
        if not body.get("stream"):
            self._send(200, {"usage": usage})
            return
        if words > 500:
            self._stream([{"error": {"message": "no memory"}}])
            return
        role, finish = {"delta": {"role": "assistant"}}, {"delta": {}, "finish_reason": "stop"}
        choices = [role, {"delta": {"content": "a"}}, {"delta": {"content": "b"}}, finish]
        self._stream([{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}])

    def _stream(self, events: Sequence[Mapping[str, object]]) -> None:
        written = [self.layouts[number % 3](event) for number, event in enumerate(events)]
        self._write(200, "text/event-stream", "\n\n".join([*written, "data: [DONE]", ""]).encode())

    def _send(self, status: int, answer: dict[str, object]) -> None:
        self._write(status, "application/json", json.dumps(answer).encode())

    def _write(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def plain() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_knows_only_openais_fields(plain: str) -> None:
    target = EndpointTarget(plain, None, None)
    assert target.environment() | {"spillway": None} == {
        "url": f"{plain}/v1",
        "model": "first",
        "ends_ignored": False,
        "spillway": None,
    }
    answers = target.run(Load(100, 3, 16), seed=1)
    assert [(answer.prompt_tokens, answer.tokens, len(answer.pieces)) for answer in answers] == [(100, 2, 2)] * 3
    with pytest.raises(LoadRefused, match="no memory"):
        target.run(Load(1000, 1, 16), seed=2)


def test_a_server_that_goes_away_is_an_error(plain: str) -> None:
    target = EndpointTarget(plain, "key", "second")
    target._base = "http://127.0.0.1:1/v1"
    with pytest.raises(BenchError, match=r"127\.0\.0\.1:1"):
        target.run(Load(100, 2, 16), seed=1)
