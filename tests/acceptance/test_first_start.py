"""The first start beside an inference server that is not ready yet."""

import re
from pathlib import Path

from benchmarks.ports import free_port
from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.system import System

FILE = """
[models.served]
[pools.gpu]
models = ["served"]
engine = {{ kind = "vllm", url = "http://127.0.0.1:{port}", tokenizer = "{tokenizer}" }}
"""


def test_login_and_endpoint_come_first_and_the_gateway_says_what_is_missing(tmp_path: Path) -> None:
    port, config = free_port(), tmp_path / "spillway.toml"
    config.write_text(FILE.format(port=port, tokenizer=DEMO_MODEL_PATH))
    system = System(tmp_path / "data", ["--config", str(config)])
    system.launch()
    try:
        system.wait_for_output(f"worker-gpu-1: starting: http://127.0.0.1:{port} is not ready")
        system.wait_for_output("gateway: ready")
        output = system.printed()
        assert re.search(r"Login +admin +\S+ +\(shown only once\)", output)
        assert output.index("Login") < output.index("gateway: ready")
        assert f"{system.base_url}/v1" in output
        with system.http() as http:
            assert http.get("/v1/models").status_code == 200
            ask = {"model": "served", "messages": [{"role": "user", "content": "Hi"}]}
            answer = http.post("/v1/chat/completions", json=ask)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "model_not_ready"
        assert "Start a worker of a pool whose `models` name it (gpu)" in error["message"]
        status = system.command("status")
        assert re.search(rf"gpu +worker-gpu-1 +starting: http://127\.0\.0\.1:{port} is not ready", status), status
        assert system.stop() == 0
        system.launch()
        system.wait_for_output("(set earlier)")
        assert system.stop() == 0
    finally:
        system.kill_if_running()
