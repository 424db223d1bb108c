"""What the configuration says of the ledger: its writer, and the payloads that are kept."""

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from accounts.checks import MAX_RETENTION_DAYS
from ledger.payloads.sealing import parse_keys
from ledger.prices import ConfiguredPrice
from protocol.settings import PositiveInt, PositiveSeconds, Settings


def _are_payload_keys(text: SecretStr) -> SecretStr:
    parse_keys(text)
    return text


class PayloadSettings(Settings):
    """How payloads are kept of callers who agreed to that."""

    # 32 random bytes in hex or base64; several, the newest first: it seals, and all of them open. None: no encryption.
    key: Annotated[SecretStr, AfterValidator(_are_payload_keys)] | None = None
    retention_days: Annotated[int, Field(gt=0, le=MAX_RETENTION_DAYS)] = 30  # where the consent says nothing else
    # Of request and answer together, as JSON. What is larger is not kept, and its row says so.
    max_payload_bytes: Annotated[int, Field(gt=0, le=4 * 1024 * 1024)] = 1024 * 1024


class LedgerSettings(Settings):
    """Everything one ledger writer needs."""

    nats_urls: tuple[str, ...]
    database_url: str
    batch_records: PositiveInt = 500  # messages written in one transaction; under load one holds several records
    batch_wait_s: PositiveSeconds = 0.25
    retention_days: PositiveInt | None = (
        None  # how long requests and attempts are kept, in whole UTC days; None: always
    )
    prices: tuple[ConfiguredPrice, ...] = ()  # entered into the price book when it starts
