"""``spillway gateway``: runs one gateway, the HTTP endpoint."""

from console.mount import mount
from gateway.main import run
from protocol import process
from spillway import logs
from spillway.cli.context import (
    ConfigOption,
    DataOption,
    ReadyFileOption,
    pepper_of,
    resolve_config,
    run_async,
    write_ready,
)


@logs.configured("gateway")
def gateway(config: ConfigOption = None, data: DataOption = None, ready_file: ReadyFileOption = None) -> None:
    """Run one gateway: the HTTP endpoint."""
    resolved = resolve_config(config, data)

    process.return_large_memory()

    async def main() -> None:
        settings = resolved.gateway_settings(pepper_of(resolved))
        console = mount(resolved.login_settings(), resolved.webhooks, resolved.console)
        await run(settings, on_ready=lambda port: write_ready(ready_file, {"port": port}), mount=console)

    run_async(main)
