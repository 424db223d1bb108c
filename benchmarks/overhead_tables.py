"""The tables that ``gateway_overhead`` prints."""

from typing import Any, Final

from rich.console import Console
from rich.table import Table

PATH_PROCESSES: Final = ("gateway", "worker instant", "worker paced", "nats")  # counted by the aims
LATENCIES: Final = (  # (load, measured quantity, label, aims for p50 and p99)
    ("idle", "latency", "idle: round trip", "3 / 10"),
    ("at_load", "latency", "200/s: round trip", ""),
    ("streamed_at_load", "ttft", "200/s, streamed: first token", ""),
    ("streamed_at_load", "latency", "200/s, streamed: round trip", ""),
    ("saturated", "latency", "64 at a time: round trip", ""),
    ("paced_streams", "inter_token", "64 streams, 20 ms: inter-token", ""),
)
COSTS: Final = (  # (load, label, divisor of µs, unit, aim)
    ("idle", "request, idle", 1000, "ms", ""),
    ("at_load", "request, 200/s", 1000, "ms", "1.5"),
    ("streamed_at_load", "streamed request, 200/s", 1000, "ms", ""),
    ("saturated", "request, 64 at a time", 1000, "ms", "1.5"),
    ("paced_streams", "token, 64 streams, 20 ms", 1, "µs", "60"),
    ("instant_streams", "token, 64 streams, 0 ms", 1, "µs", "60"),
)
CORES: Final = ("others (cores)", "stolen (cores)")  # disturbances of a run


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Print latencies and costs side by side, Spillway's and those of the peers that were measured."""
    console.print(_latency_table(report))
    console.print(_cost_table(report))


def _latency_table(report: dict[str, Any]) -> Table:
    table = Table("added, ms (p50 / p99)", "aim", "Spillway", "per s", title="Latency added", title_justify="left")
    litellm, dynamo = report.get("litellm"), report.get("dynamo")
    for name in [name for name, peer in (("LiteLLM", litellm), ("Dynamo", dynamo)) if peer]:
        table.add_column(name)
        table.add_column("per s")
    for load, timed, label, aim in LATENCIES:
        row = [label, aim, *_timed(report["spillway"][load], timed)]
        if litellm:
            # The backend's gaps already exclude the 20 ms, like the proxy's.
            row += _timed(litellm[load], timed, report["backend"][load])
        if dynamo:
            row += _timed(dynamo[load], timed)
        table.add_row(*row)
    return table


def _timed(load: dict[str, Any], timed: str, direct: dict[str, Any] | None = None) -> tuple[str, str]:
    """Return a load's latency, minus the backend's alone, and its rate."""
    p50, p99 = (load[timed][name] - (direct[timed][name] if direct else 0.0) for name in ("p50_ms", "p99_ms"))
    return f"{p50:,.2f} / {p99:,.2f}", f"{load['per_s']:,.0f}"


def _cost_table(report: dict[str, Any]) -> Table:
    table = Table("CPU per", "", "aim", "path", "gateway", "worker", "NATS", "ledger", "client", *CORES)
    table.title, table.title_justify = "CPU (path = gateway + worker + NATS)", "left"
    peers = [(name, report[name.lower()]) for name in ("LiteLLM", "Dynamo") if name.lower() in report]
    for peer, _ in peers:
        for name in (peer, *CORES):
            table.add_column(name)
    for load, label, divisor, unit, aim in COSTS:
        own = report["spillway"][load]
        cpu = {name: value / divisor for name, value in own["cpu_us"].items()}
        worker = cpu["worker instant"] + cpu["worker paced"]
        shown = (cpu["gateway"], worker, cpu["nats"], cpu["ledger"], cpu["load client"])
        path = sum(cpu[name] for name in PATH_PROCESSES)
        row = [label, unit, aim, f"{path:.2f}", *(f"{value:.2f}" for value in shown), *_cores(own)]
        for _, peer in peers:
            # All its processes except the backend, which stands for the engine; for Dynamo including the mockers.
            cpu_us = sum(us for name, us in peer[load]["cpu_us"].items() if name not in {"backend", "load client"})
            row += [f"{cpu_us / divisor:.2f}", *_cores(peer[load])]
        table.add_row(*row)
    return table


def _cores(load: dict[str, Any]) -> tuple[str, str]:
    return f"{load['others_cores']:.2f}", f"{load['stolen_cores']:.2f}"
