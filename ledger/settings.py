"""Settings of the ledger writer and of stored payloads."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from db.accounts.checks import MAX_RETENTION_DAYS
from db.money import ConfiguredPrice
from ledger.payloads.sealing import parse_keys
from protocol.process import PositiveInt, PositiveSeconds, Settings


def _are_payload_keys(text: SecretStr) -> SecretStr:
    parse_keys(text)
    return text


class PayloadSettings(Settings):
    """Settings for payloads of clients who agreed to have them stored."""

    # 32 random bytes in hex or base64; several, the newest first: that one seals, all open. None: no encryption.
    key: Annotated[SecretStr, AfterValidator(_are_payload_keys)] | None = None
    retention_days: Annotated[int, Field(gt=0, le=MAX_RETENTION_DAYS)] = 30  # unless the consent says otherwise
    # Of request and answer together, as JSON. Larger ones are not stored, and their row says so.
    max_payload_bytes: Annotated[int, Field(gt=0, le=4 * 1024 * 1024)] = 1024 * 1024


class LedgerSettings(Settings):
    """Everything one ledger writer needs."""

    nats_urls: tuple[str, ...]
    nats_credentials: Path | None = None  # our user at the queue server; None: what the URLs say
    nats_ca_file: Path | None = None  # who vouches for the queue server's certificate; None: the usual authorities
    database_url: str
    batch_records: PositiveInt = 500  # messages written in one transaction; under load one holds several records
    batch_wait_s: PositiveSeconds = 0.25
    retention_days: PositiveInt | None = (
        None  # how long requests and attempts are kept, in whole UTC days; None: permanently
    )
    prices: tuple[ConfiguredPrice, ...] = ()  # entered into the price book when it starts
    # The writer's own pace, for which spillway.toml has no keys.
    hold_intents_s: float = 3.0  # far below the consumer's ack_wait, after which others would get the same
    abandoned_period_s: float = 5.0
    abandoned_after_ms: int = 30_000  # for how long no gateway has held a request
    purge_period_s: float = 60.0
    retry_parking_s: float = 10.0  # until a message whose records could not be parked is delivered again
