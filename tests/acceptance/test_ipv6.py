"""``spillway up`` at IPv6 addresses: who can reach it, and by which URLs."""

import re
import shlex
from pathlib import Path

import httpx
import pytest

from tests.acceptance.system import System, run_system
from tests.waiting import HANGS_S

SERVED = '[models.scripted]\n[pools.local]\nmodels = ["scripted"]\nengine = { kind = "scripted" }\n'
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "[[tokens=5]] hello"}]}


@pytest.mark.parametrize(
    ("host", "printed", "reached_at"),
    [("::", "127.0.0.1", ("127.0.0.1", "[::1]")), ("::1", "[::1]", ("[::1]",))],
)
def test_up_listens_where_it_says(tmp_path: Path, host: str, printed: str, reached_at: tuple[str, ...]) -> None:
    config = tmp_path / "spillway.toml"
    config.write_text(f'[gateway]\nhost = "{host}"\n{SERVED}')
    with run_system(System(tmp_path / "data", ["--config", str(config)])) as system:
        url = f"http://{printed}:{system.port}"
        assert re.findall(r"http://\S+", system.output)[:2] == [f"{url}/v1", f"{url}/dashboard"]
        curl = next(line for line in system.output.splitlines() if line.startswith("curl"))
        assert shlex.split(curl.rstrip("\\"))[2] == f"{url}/v1/chat/completions"
        listening = f"listening on http://[{host}]:{system.port}"
        assert listening in (system.data_dir / "logs" / "gateway.log").read_text()
        headers = {"Authorization": f"Bearer {system.api_key}"}
        for address in reached_at:
            with httpx.Client(base_url=f"http://{address}:{system.port}", headers=headers, timeout=HANGS_S) as http:
                assert http.post("/v1/chat/completions", json=ASK).status_code == 200
                assert http.get("/login").status_code == 200
