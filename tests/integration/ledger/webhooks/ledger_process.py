"""Ledger processes with webhooks, to be killed."""

from functools import partial
from pathlib import Path

import uvloop
from pydantic import SecretStr

from ledger.main import run
from ledger.settings import LedgerSettings
from ledger.webhooks.main import run as webhooks
from ledger.webhooks.settings import WebhookSettings
from tests.forks import Process


def start_ledger_process(log: Path, settings: LedgerSettings, chosen: WebhookSettings, pepper: SecretStr) -> Process:
    return Process(log, write_and_send, settings, chosen, pepper)


def write_and_send(settings: LedgerSettings, chosen: WebhookSettings, pepper: SecretStr) -> None:
    """Be a ledger process."""
    uvloop.run(run(settings, beside=partial(webhooks, settings=chosen, pepper=pepper)))
