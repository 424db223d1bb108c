"""``spillway ledger``."""

import logging
import os
from functools import partial
from typing import Final

from db.accounts.errors import PepperError
from ledger.main import run
from ledger.webhooks.main import run as run_webhooks
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

LEDGER_NICENESS: Final = 10  # on a gateway's machine, serving requests has priority over writing their rows
log = logging.getLogger(__name__)


@logs.configured("ledger")
def ledger(config: ConfigOption = None, data: DataOption = None, ready_file: ReadyFileOption = None) -> None:
    """Run one ledger writer: it writes usage records to SQL and delivers webhooks. You can run several."""
    resolved = resolve_config(config, data)
    os.nice(LEDGER_NICENESS)
    try:
        webhooks = partial(run_webhooks, settings=resolved.webhooks, pepper=pepper_of(resolved))
    except PepperError as error:
        webhooks = None
        log.error("webhooks are not delivered: their secrets cannot be decrypted: %s", error)  # noqa: TRY400

    def note(is_ready: bool) -> None:
        write_ready(ready_file, {} if is_ready else None)

    run_async(lambda: run(resolved.ledger_settings(), on_ready=note, beside=webhooks))
