"""``spillway config``: checking the configuration file."""

from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.context import out, resolve_config
from spillway.config import DEFAULT_CONFIG_NAME


def check(
    path: Annotated[Path | None, typer.Argument(help=f"Default: ./{DEFAULT_CONFIG_NAME}")] = None,
) -> None:
    """Validate a configuration together with the environment; report every invalid key."""
    resolved = resolve_config(path or Path(DEFAULT_CONFIG_NAME), None)
    unserved = [name for name in resolved.models if not any(name in pool.models for pool in resolved.pools.values())]
    out.print(f"ok: {len(resolved.models)} model(s), {len(resolved.pools)} pool(s)")
    for name in unserved:
        out.print(f"note: models.{name} is served by no pool of this file", style="yellow")
    for name in [name for name, pool in resolved.pools.items() if pool.trusted and not resolved.nats.credentials]:
        out.print(
            f"note: pools.{name} is trusted, and without nats.credentials any worker may take its jobs", style="yellow"
        )
