"""The steps of ``make compose``, in order. Each returns what it measured in a line, or raises."""

import json
import re
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

from tests.certificates import certified
from tests.compose.docker import build_images, call, copy_checkout, has_image
from tests.compose.load import REQUESTS_AT_LEAST, Load, Tally
from tests.compose.pages import COMPOSE, OBSERVABILITY, ONE_BOX
from tests.compose.rig import LABEL, REQUEST_LIMIT_S, Rig, Skipped, eventually
from tests.unit.deploy.description import observability

FORGED: Final = "192.0.2.1"
DEMO: Final = "spillway-demo"
DEMO_IN_IMAGE: Final = "/opt/venv/lib/python3.11/site-packages/spillway/_roots/models/spillway-demo"
HOST: Final = "llm.example.com"
MANY: Final = 30  # requests, of which each of three gateways has some
SEPARATOR: Final = "[DONE]"


def copy_and_build(rig: Rig) -> str:
    """Copy the checkout as umask 077 makes it, and build all images."""
    copy_checkout(rig.project.folder)
    names = build_images(rig.project.folder, rig.log)
    fits = rig.project.fit_haproxy()
    lowered = f"; this Docker gives containers few open files, so HAProxy's maxconn is {fits}" if fits else ""
    return f"{len(names)} images{lowered}"


def four_commands_to_a_stream(rig: Rig) -> str:
    """The first page, from nothing to a stream."""
    stream = rig.page(ONE_BOX, "Four commands to a stream")
    assert SEPARATOR in stream, stream
    states = rig.project.states(rig.log)
    assert not {name for name, state in states.items() if state not in {"healthy", "exited"}}, states
    events = stream.count("data: ")
    return f"{sum(state == 'healthy' for state in states.values())} services healthy, {events} events of a stream"


def usage_and_dashboard(rig: Rig) -> str:
    """The request is in the ledger's table and on the dashboard; the commands of the second page work."""
    rig.page(COMPOSE, "Run the compose installation")
    out = rig.page(ONE_BOX, "Four commands to a stream", 1)
    [rig.password] = re.findall(r"^(\S+)\nfor user admin", out, re.MULTILINE)
    eventually(lambda: DEMO in rig.compose("exec", "-T", "gateway-1", "spillway", "usage"), "usage shows the request")
    with logged_in(rig, rig.password) as browser:
        page = eventually(
            lambda: (found := browser.get("/dashboard")).status_code == 200 and DEMO in found.text and found.text,
            "the dashboard shows the model",
        )
    return f"in `spillway usage`, and on a dashboard of {len(page):,} characters"


@contextmanager
def logged_in(rig: Rig, password: str, **headers: str) -> Iterator[httpx.Client]:
    """Yield a browser that has given this password."""
    address = f"http://127.0.0.1:{rig.project.pages_port}"
    with httpx.Client(base_url=address, headers={"accept": "text/html", **headers}) as browser:
        browser.post("/login", data={"name": "admin", "password": password, "next": ""}, timeout=REQUEST_LIMIT_S)
        yield browser


def a_forged_address_is_not_believed(rig: Rig) -> str:
    """A caller that says it is another is counted by its own address."""
    with logged_in(rig, "wrong", **{"x-forwarded-for": FORGED}):
        logs = eventually(
            lambda: re.findall(r"wrong password for \S+ from ([\d.]+)", rig.compose("logs", "gateway-1", "gateway-2")),
            "the wrong password is logged",
        )
    assert set(logs) == {f"{rig.project.subnet}.1"}, logs
    return f"a wrong password was logged as from {logs[0]}, not {FORGED}"


def none_failed(tally: Tally) -> str:
    """Judge a load."""
    assert tally.asked >= REQUESTS_AT_LEAST, tally
    assert not tally.failed, tally
    return str(tally)


def another_model_under_load(rig: Rig) -> str:
    """A model and its worker are added by the page, under load."""
    [toml], [override] = COMPOSE.blocks("Another model", "toml"), COMPOSE.blocks("Another model", "yaml")
    with (rig.project.folder / "deploy/compose/spillway.toml").open("a") as config:
        config.write(f"\n{toml}")
    (rig.project.folder / "docker-compose.override.yml").write_text(override)
    roll = COMPOSE.script("Change the configuration", 0, {})
    assert roll in COMPOSE.script("Another model", 0, {})
    begun_s = time.monotonic()
    with Load(rig.project.port, rig.key) as load:
        out = rig.page(COMPOSE, "Another model")
        took_s = time.monotonic() - begun_s
    assert '"choices"' in out, out
    return f"{none_failed(load.tally)}; the commands took {took_s:.0f} s"


def upgrade_under_load(rig: Rig) -> str:
    """New images of all that is ours, under load. A line in a source stands in for ``git pull``."""
    with (rig.project.folder / "spillway/__init__.py").open("a") as source:
        source.write("\n# upgraded\n")
    before = image_ids(rig)
    begun_s = time.monotonic()
    with Load(rig.project.port, rig.key, (DEMO, "two")) as load:
        build_images(rig.project.folder, rig.log)
        built_s = time.monotonic() - begun_s
        rig.page(COMPOSE, "Upgrade", ours={"git pull": ": # a changed source stands in for git pull"})
        took_s = time.monotonic() - begun_s
    after = image_ids(rig)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed >= {"gateway-1", "gateway-2", "ledger", "worker", "worker-two"}, changed
    assert not changed & {"nats", "postgres", "load-balancer"}, changed
    return f"{none_failed(load.tally)}; {took_s:.0f} s, of which building {built_s:.0f} s"


def image_ids(rig: Rig) -> dict[str, str]:
    """Return service to the image that its containers run."""
    ids = rig.compose("ps", "--quiet").split()
    form = '{{index .Config.Labels "com.docker.compose.service"}} {{.Image}}'
    return dict(line.split() for line in call("docker", "inspect", *ids, "--format", form).splitlines())


def second_provider(rig: Rig) -> str:
    """A hosted API, which a container stands in for."""
    rig.run_beside(
        "hosted-api",
        *("--network", f"{rig.name}_outbound", "--network-alias", "hosted-api"),
        *("--volume", f"{rig.project.folder}/tests/compose/hosted_api.py:/hosted_api.py:ro", "--user", "0"),
        *("--entrypoint", "python", "spillway-gateway:0.2.0", "/hosted_api.py"),
    )
    shipped = rig.project.folder / "deploy/compose/hosted-api.toml"
    text = shipped.read_text()
    for theirs, ours in (
        ("https://api.openai.com", "http://hosted-api:8000"),
        ("tiktoken:o200k_base", DEMO_IN_IMAGE),  # the encoding would be downloaded
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    shipped.write_text(text)
    stream = rig.page(ONE_BOX, "Four more to a second provider")
    assert " surplus" in stream, stream
    assert SEPARATOR in stream, stream
    other = rig.compose("exec", "-T", "gateway-1", "spillway", "keys", "create", "second").strip()
    refused = eventually(lambda: (answer := rig.ask("gpt-4.1-mini", other)).status_code != 401 and answer, "the key")
    assert refused.status_code == 403, refused.text
    asked = call("docker", "logs", f"{rig.name}-hosted-api").count("asked for gpt-4.1-mini")
    return f"{asked} request answered by the stand-in; a key without permission got {refused.status_code}"


def more_workers(rig: Rig) -> str:
    """Two workers, also after a plain ``up``."""
    rig.page(COMPOSE, "More workers")
    rig.compose("up", "--no-build", "--detach", "--wait")
    count = Counter(rig.compose("ps", "--format", "{{.Service}}").split())["worker"]
    assert count == 2, count
    assert rig.ask(DEMO).status_code == 200
    return f"{count} workers, also after a plain `up`"


def workers_on_other_machines(rig: Rig) -> str:
    """The queue is published, and nothing else restarts; a worker beside the project serves alone."""
    before = rig.container_ids()
    address = f"{rig.project.subnet}.1"
    rig.page(COMPOSE, "Workers on other machines", ours={"10.8.0.1": address})
    after = rig.container_ids()
    restarted = {name for name in before if before[name] != after.get(name)}
    assert restarted == {f"{rig.name}-nats-1"}, restarted
    password = re.findall(r"^NATS_PASSWORD=(\w+)$", (rig.project.folder / ".env").read_text(), re.MULTILINE)[0]
    name = f"{rig.name}-remote"
    (rig.project.folder / "deploy/compose/remote-worker.toml").chmod(0o644)
    rig.page(
        COMPOSE,
        "Workers on other machines",
        1,
        ours={
            "--name spillway-worker": f"--name {name} --label {LABEL}={rig.name}",
            "--volume spillway-worker:": "--volume ",
            "PASSWORD@10.8.0.1": f"{password}@{address}",
        },
    )
    health = ("docker", "inspect", "--format", "{{.State.Health.Status}}", name)
    eventually(lambda: call(*health).strip() == "healthy", "the worker elsewhere is healthy")
    rig.compose("stop", "worker")
    answer = rig.ask(DEMO)
    rig.compose("start", "worker")
    assert answer.status_code == 200, answer.text
    call("docker", "rm", "--force", "--volumes", name)
    return f"{address}:4222; only nats restarted; a container outside answered while no worker was here"


def tls(rig: Rig) -> str:
    """HAProxy presents a certificate, takes a renewed one, and says https to the gateways."""
    folder, port, pages_port = rig.project.folder, rig.project.tls_port, rig.project.pages_tls_port
    make_certificate(rig)
    curl = f"curl --silent --cacert ca.pem --resolve {HOST}:{port}:127.0.0.1 https://{HOST}:{port}"
    out = rig.page(COMPOSE, "TLS", ours={f"curl https://{HOST}": curl})
    assert DEMO in out, out
    first = ssl.get_server_certificate(("127.0.0.1", port))
    trusting = ssl.create_default_context(cafile=folder / "ca.pem")
    trusting.check_hostname = False
    with httpx.Client(base_url=f"https://127.0.0.1:{pages_port}", verify=trusting) as browser:
        answer = browser.post("/login", data={"name": "admin", "password": rig.password, "next": ""})
    assert "Secure" in answer.headers["set-cookie"], answer.headers
    make_certificate(rig)
    rig.page(COMPOSE, "TLS", 1)
    eventually(lambda: ssl.get_server_certificate(("127.0.0.1", port)) != first, "the renewed certificate")
    return "models listed over TLS, the login's cookie is for TLS only, a renewed certificate was loaded"


def make_certificate(rig: Rig) -> None:
    """Write what an authority gives out: the chain, and the key."""
    folder = rig.project.folder
    certified(folder, HOST)
    whole = (folder / f"{HOST}.pem").read_text()
    at = whole.index("-----BEGIN PRIVATE KEY-----")
    (folder / "fullchain.pem").write_text(whole[:at])
    (folder / "privkey.pem").write_text(whole[at:])


def third_gateway(rig: Rig) -> str:
    """A gateway more, to which HAProxy sends its part."""
    [override] = COMPOSE.blocks("A third gateway", "yaml")
    file = rig.project.folder / "docker-compose.override.yml"
    file.write_text(file.read_text() + override.removeprefix("services:\n"))
    rig.page(COMPOSE, "A third gateway")

    def is_asked() -> bool:
        statuses = {rig.ask(DEMO).status_code for _ in range(MANY)}
        return statuses == {200} and '"endpoint":"chat.completions"' in rig.compose("logs", "gateway-3")

    eventually(is_asked, "gateway-3 is asked")
    return f"{MANY} requests, some at gateway-3"


def engine_benchmark(rig: Rig) -> str:
    """``spillway bench engine`` in the worker's container."""
    out = rig.page(COMPOSE, "Another model", 2)
    assert "tokens/s" in out, out
    return "a table of " + f"{len(out.splitlines())} lines"


def alerts(rig: Rig) -> str:
    """Prometheus, where its image can be had, scrapes the gateways and evaluates our rules."""
    need_image("prometheus")
    rig.page(OBSERVABILITY, "Boards and alerts")
    eventually(lambda: [one["value"][1] for one in told(rig, "query?query=sum(up)")["result"]] == ["2"], "both scraped")

    def health() -> list[str]:
        return [rule["health"] for group in told(rig, "rules")["groups"] for rule in group["rules"]]

    rules = eventually(lambda: (found := health()) and set(found) == {"ok"} and found, "all rules evaluated")
    return f"both gateways are scraped, {len(rules)} rules are evaluated"


def told(rig: Rig, question: str) -> Any:
    """Return what Prometheus answers."""
    url = f"http://127.0.0.1:9090/api/v1/{question}"
    return json.loads(rig.compose("exec", "-T", "prometheus", "wget", "-q", "-O", "-", url))["data"]


def boards(rig: Rig) -> str:
    """Grafana, where its image can be had."""
    need_image("grafana")
    rig.page(OBSERVABILITY, "Boards and alerts", 1)
    states = rig.project.states(rig.log)
    assert states[f"{rig.name}-grafana-1"] == "healthy", states
    return "Grafana is healthy"


def need_image(service: str) -> None:
    """Skip the step if the image of this service cannot be had."""
    image = observability()[service]["image"]
    if not has_image(image):
        raise Skipped(f"no image {image} here, and none to be pulled")


def down(rig: Rig) -> str:
    """The page's last command; nothing of it runs afterwards, and the volumes stay."""
    rig.remove_beside()
    rig.page(ONE_BOX, "Next")
    left = call("docker", "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={rig.name}").split()
    assert not left, left
    volumes = call("docker", "volume", "ls", "--quiet", "--filter", f"label=com.docker.compose.project={rig.name}")
    assert len(volumes.split()) >= 5, volumes
    return f"no container left, {len(volumes.split())} volumes kept until the end of this run"


# Blocks of the pages that no step runs, and why.
NOT_RUN: Final = {
    ("one-box.md", "Without Docker", 0): "tests/acceptance runs `make run`",
    ("one-box.md", "Without Docker", 1): "tests/integration/test_worker_command.py",
    ("compose.md", "Another model", 1): "needs an NVIDIA GPU",
    ("compose.md", "A fleet at a cloud", 0): "needs an account at a cloud",
}
