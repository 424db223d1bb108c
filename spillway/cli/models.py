"""``spillway models``: the configured models and their state."""

from typing import Any

from spillway.cli.context import ResolvedConfig, command, out
from spillway.cli.output import JsonOption, print_table
from spillway.cli.running import gateway_state
from spillway.config import Config


@command
async def models(*, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """List the models of the configuration: their names, context, price, pools, and whether they are ready."""
    state = await gateway_state(config)
    rows = [_row(config, name, state) for name in config.models]
    if as_json:
        out.print_json(data=rows)
        return
    cells = (
        (
            row["model"],
            ", ".join(row["aliases"]),
            "-" if row["context_length"] is None else f"{row['context_length']:,}",
            "no price" if row["price"] is None else f"{row['price']['prompt']:g} / {row['price']['completion']:g}",
            ", ".join(row["pools"]) or "none",
            row["state"],
        )
        for row in rows
    )
    print_table(("model", "aliases", "context", "USD per 1M tokens", "pools", "state"), cells)


def _row(config: Config, name: str, state: dict[str, Any] | None) -> dict[str, Any]:
    model = config.models[name]
    return {
        "model": name,
        "aliases": list(model.aliases),
        "context_length": model.context_length,
        "price": None if model.price is None else model.price.model_dump(mode="json"),
        "pools": [pool for pool, settings in config.pools.items() if name in settings.models],
        "state": _state(name, state),
    }


def _state(name: str, state: dict[str, Any] | None) -> str:
    if state is None:
        return "unknown: no gateway answers"
    if name in state["models_unusable"]:
        return f"unusable: {state['models_unusable'][name]}"
    return "not ready" if name in state["models_not_ready"] else "ready"
