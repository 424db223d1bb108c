"""The settings of a fleet controller, derived from the configuration."""

import json
from collections.abc import Mapping

from fleet.settings import ControllerSettings, ManagedPool
from protocol.subjects import queue_of
from spillway.config import Config, process_id
from spillway.config_values import ENV_PREFIX


def controller_settings(config: Config, worker_commands: Mapping[str, tuple[str, ...]]) -> ControllerSettings:
    """Return the settings of a fleet controller. Raises ConfigError without a queue server.

    ``worker_commands``: the command that starts a worker on this machine, by pool.
    """
    managed = {
        name: ManagedPool(
            tier=pool.tier,
            queues=frozenset(queue_of(model, trusted=pool.trusted) for model in pool.models),
            usd_per_hour=pool.usd_per_hour,
            drain_s=pool.drain_s,
            fleet=pool.fleet,
        )
        for name, pool in config.pools.items()
        if pool.fleet is not None
    }
    return ControllerSettings(
        controller_id=process_id("fleet"),
        **config.queue_settings("fleet"),
        database_url=config.database_url,
        data_dir=config.data_dir,
        fleet=config.fleet,
        pools=managed,
        trusted_pools=frozenset(name for name, pool in config.pools.items() if pool.trusted),
        worker_commands=worker_commands,
        worker_environment=_worker_environment(config),
        local_environment=_local_environment(config),
        hosted_usd_per_token=_hosted_prices(config),
    )


def _hosted_prices(config: Config) -> dict[str, float]:
    """Return the price of a token at the cheapest hosted pool, by model: the mean of prompt and output prices."""
    prices: dict[str, float] = {}
    for pool in config.pools.values():
        for model, price in pool.prices.items():
            usd = (price.prompt + price.completion) / 2 / 1e6
            prices[model] = min(usd, prices.get(model, usd))
    return {model: usd for model, usd in prices.items() if usd > 0}


def _worker_environment(config: Config) -> dict[str, str]:
    """Return the variables of ``[nats]`` for workers on any machine. They override the worker's file."""
    return {
        f"{ENV_PREFIX}NATS__URLS": json.dumps(config.nats.urls),
        f"{ENV_PREFIX}NATS__ALLOW_PLAINTEXT": json.dumps(config.nats.allow_plaintext),
    }


def _local_environment(config: Config) -> dict[str, str]:
    """Return the additional variables of ``[nats]`` for workers on this machine."""
    files = {"CREDENTIALS": config.nats.credentials, "CA_FILE": config.nats.ca_file}
    return {f"{ENV_PREFIX}NATS__{name}": str(path.resolve()) for name, path in files.items() if path is not None}
