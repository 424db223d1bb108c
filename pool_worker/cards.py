"""Publishes how to count and render prompts for the models this worker serves."""

import asyncio
import logging
from typing import Final

from pool_worker.engines.base import Engine
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.objects import publish_model_card, revision_of
from protocol.process import backoff_s

AGAIN_AFTER_S: Final = 1.0  # at the earliest

log = logging.getLogger(__name__)


class ModelCards:
    """Publishes the models' cards, and again whenever the buckets may have been lost."""

    def __init__(self, bus: Bus, engine: Engine, models: tuple[str, ...]) -> None:
        self._bus = bus
        cards = [engine.model_card(model) for model in models]
        self.revisions = {card.model: revision_of(card) for card, _ in cards}
        self._cards = [(card, tokenizer_json) for card, tokenizer_json in cards if tokenizer_json]
        self._is_due = asyncio.Event()

    def publish_again(self) -> None:
        """Publish all cards soon: the buckets may have been lost, or hold the card of a departed worker."""
        self._is_due.set()

    async def run(self) -> None:
        """Publish as often as asked to; cancel it to stop."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            await self.publish()
            await asyncio.sleep(AGAIN_AFTER_S)

    async def publish(self) -> None:
        """Publish all cards, however long it takes until the buckets exist."""
        has_failed = False
        for wait_s in backoff_s():
            try:
                for card, tokenizer_json in self._cards:
                    await publish_model_card(self._bus, card, tokenizer_json)
            except BusError as error:
                if not has_failed:
                    log.warning("model cards cannot be published yet: %s", error)
                has_failed = True
                await asyncio.sleep(wait_s)
            else:
                return
