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
    """Settings of stored payloads, for clients that consent."""

    # 32 random bytes in hex or base64. Several keys: the first (newest) encrypts, all decrypt. None: no encryption.
    key: Annotated[SecretStr, AfterValidator(_are_payload_keys)] | None = None
    retention_days: Annotated[int, Field(gt=0, le=MAX_RETENTION_DAYS)] = (
        30  # default; a key's or team's consent can set another value
    )
    # Limit of request and answer together, as JSON. Larger payloads are not stored; their row is marked as dropped.
    max_payload_bytes: Annotated[int, Field(gt=0, le=4 * 1024 * 1024)] = 1024 * 1024


class LedgerSettings(Settings):
    """Everything one ledger writer needs."""

    nats_urls: tuple[str, ...]
    nats_credentials: Path | None = None  # credentials file for the queue server; None: user and password of the URLs
    nats_ca_file: Path | None = None  # CA of the queue server's certificate; None: the system's CAs
    database_url: str
    batch_records: PositiveInt = 500  # messages per transaction; under load, a message holds several records
    batch_wait_s: PositiveSeconds = 0.25
    retention_days: PositiveInt | None = (
        None  # how long requests and attempts are kept, in whole UTC days; None: no limit
    )
    prices: tuple[ConfiguredPrice, ...] = ()  # entered into the price book at the start
    # Constants of the writer, without keys in spillway.toml.
    hold_intents_s: float = 3.0  # far below the consumer's ack_wait, after which intents are redelivered
    abandoned_period_s: float = 5.0
    abandoned_after_ms: int = 30_000  # a request that no gateway has held for this long is abandoned
    purge_period_s: float = 60.0
    retry_parking_s: float = 10.0  # wait before a message whose records could not be parked is redelivered
