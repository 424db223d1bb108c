"""The tables that ``gateway_overhead`` prints."""

from typing import Any, Final

from rich.console import Console
from rich.table import Table

PATH_PROCESSES: Final = ("gateway", "worker instant", "worker paced", "nats")  # what the aims count
LATENCIES: Final = (  # (load, what was timed, how the row is called, aims for p50 and p99)
    ("idle", "latency", "idle: round trip", "3 / 10"),
    ("at_load", "latency", "200/s: round trip", ""),
    ("streamed_at_load", "ttft", "200/s, streamed: first token", ""),
    ("streamed_at_load", "latency", "200/s, streamed: round trip", ""),
    ("saturated", "latency", "64 at a time: round trip", ""),
    ("paced_streams", "inter_token", "64 streams, 20 ms: inter-token", ""),
)
COSTS: Final = (  # (load, how the row is called, divisor of µs, unit, aim)
    ("idle", "request, idle", 1000, "ms", ""),
    ("at_load", "request, 200/s", 1000, "ms", "1.5"),
    ("streamed_at_load", "streamed request, 200/s", 1000, "ms", ""),
    ("saturated", "request, 64 at a time", 1000, "ms", "1.5"),
    ("paced_streams", "token, 64 streams, 20 ms", 1, "µs", "60"),
    ("instant_streams", "token, 64 streams, 0 ms", 1, "µs", "60"),
)
CORES: Final = ("others (cores)", "stolen (cores)")  # what disturbs a run


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Print latencies and costs side by side, Spillway's and where measured LiteLLM's."""
    console.print(_latency_table(report))
    console.print(_cost_table(report))


def _latency_table(report: dict[str, Any]) -> Table:
    table = Table("added, ms (p50 / p99)", "aim", "Spillway", "per s", title="Latency added", title_justify="left")
    peer = report.get("litellm")
    if peer:
        table.add_column("LiteLLM")
        table.add_column("per s")
    for load, timed, label, aim in LATENCIES:
        own = report["spillway"][load]
        row = [label, aim, _pair(own[timed]["p50_ms"], own[timed]["p99_ms"]), f"{own['per_s']:,.0f}"]
        if peer:
            direct = report["backend"][load][timed]
            proxied = peer[load][timed]
            # The gaps of the backend have been freed of the 20 ms already, as those of the proxy.
            added = [proxied[name] - direct[name] for name in ("p50_ms", "p99_ms")]
            row += [_pair(*added), f"{peer[load]['per_s']:,.0f}"]
        table.add_row(*row)
    return table


def _cost_table(report: dict[str, Any]) -> Table:
    table = Table("CPU per", "", "aim", "path", "gateway", "worker", "NATS", "ledger", "client", *CORES)
    table.title, table.title_justify = "CPU (path = gateway + worker + NATS)", "left"
    peer = report.get("litellm")
    if peer:
        table.add_column("LiteLLM")
        for name in CORES:
            table.add_column(name)
    for load, label, divisor, unit, aim in COSTS:
        own = report["spillway"][load]
        cpu = {name: value / divisor for name, value in own["cpu_us"].items()}
        worker = cpu["worker instant"] + cpu["worker paced"]
        shown = (cpu["gateway"], worker, cpu["nats"], cpu["ledger"], cpu["load client"])
        path = sum(cpu[name] for name in PATH_PROCESSES)
        row = [label, unit, aim, f"{path:.2f}", *(f"{value:.2f}" for value in shown), *_cores(own)]
        if peer:
            row += [f"{peer[load]['cpu_us']['litellm'] / divisor:.2f}", *_cores(peer[load])]
        table.add_row(*row)
    return table


def _cores(load: dict[str, Any]) -> tuple[str, str]:
    return f"{load['others_cores']:.2f}", f"{load['stolen_cores']:.2f}"


def _pair(p50: float, p99: float) -> str:
    return f"{p50:,.2f} / {p99:,.2f}"
