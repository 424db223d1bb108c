"""Sends due deliveries concurrently and stores their outcomes."""

import asyncio
import logging
import time
from typing import Final

from db.engine import SQL_ERRORS, describe
from ledger.webhooks.deliveries import DELETE_ROWS, Attempt, Claim, Deliveries, DeliverySlots
from ledger.webhooks.secrets import SecretBox, SecretError
from ledger.webhooks.sender import Sender
from ledger.webhooks.settings import WebhookSettings
from ledger.webhooks.slack import is_slack, slack_body
from protocol.nats.clock import unix_now_ms
from protocol.process import backoff_s, wait_for

STOP_LIMIT_S: Final = 5.0  # for running attempts at shutdown; other processes repeat interrupted ones
CLEANING_PERIOD_S: Final = 600.0
_DAY_MS: Final = 24 * 3600 * 1000

log = logging.getLogger(__name__)


class Deliverer:
    """Delivers until stopped."""

    def __init__(
        self,
        deliveries: Deliveries,
        settings: WebhookSettings,
        box: SecretBox,
        added: asyncio.Event,
        stopping: asyncio.Event,
    ) -> None:
        """``added`` is set when there may be a new delivery."""
        self._deliveries = deliveries
        self._settings = settings
        self._box = box
        self._added = added
        self._stopping = stopping
        self._slots = DeliverySlots(settings.in_flight, settings.in_flight_per_endpoint)
        self._running: set[asyncio.Task[None]] = set()
        self._cleaned_s = float("-inf")  # when it last found no more old deliveries; monotonic clock

    async def run(self) -> None:
        """Claim, send and store outcomes until ``stopping`` is set."""
        sender = Sender(self._settings)
        try:
            while not self._stopping.is_set():
                self._added.clear()
                if not await self._start_due(sender):
                    await self._clean()
                    await wait_for(self._added, self._settings.poll_s)
            if self._running:
                await asyncio.wait(self._running, timeout=STOP_LIMIT_S)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            sender.close()

    async def _start_due(self, sender: Sender) -> bool:
        """Start attempts of due deliveries up to the free slots; return whether there may be more."""
        if self._slots.left <= 0:
            return False
        try:
            claims = await self._deliveries.claim(self._slots, self._settings.total_s + self._settings.lease_s)
        except SQL_ERRORS as error:
            log.warning("cannot load due webhooks, will retry: %s", describe(error))
            return False
        for claim in claims:
            task = asyncio.create_task(self._deliver(sender, claim), name=f"webhook-{claim.event_id}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return bool(claims)

    async def _deliver(self, sender: Sender, claim: Claim) -> None:
        try:
            await self._settle(claim, await self._attempt(sender, claim))
        finally:
            self._slots.leave(claim.endpoint_id)
            self._added.set()  # a slot is free for the next one

    async def _attempt(self, sender: Sender, claim: Claim) -> Attempt:
        try:
            secrets = [self._box.open(sealed, claim.endpoint_id) for sealed in claim.sealed_secrets]
        except SecretError as error:
            log.error("webhook %s is not sent: %s", claim.event_id, error)  # noqa: TRY400
            return Attempt(error=str(error))
        try:
            body = claim.body.encode()
            body = slack_body(body) if is_slack(claim.url) else body
            return await sender.send(claim.url, secrets, claim.event_id, body)
        except Exception as mistake:  # counts as a failure, so that it is not repeated forever
            log.exception("webhook %s to %s cannot be sent", claim.event_id, claim.endpoint_id)
            return Attempt(error=f"cannot be sent: {type(mistake).__name__}")

    async def _settle(self, claim: Claim, attempt: Attempt) -> None:
        """Store the outcome, retrying until the claim ends: after that, the delivery is repeated."""
        if attempt.error is not None:
            facts = (claim.event_id, claim.endpoint_id, claim.attempts, attempt.error)
            log.info("webhook %s to %s, attempt %d: %s", *facts)
        for wait_s in backoff_s():
            try:
                reason = await self._deliveries.settle(claim, attempt)
            except SQL_ERRORS as error:
                if unix_now_ms() >= claim.due_unix_ms:
                    log.error(  # noqa: TRY400
                        "cannot store the outcome of webhook %s, will resend: %s", claim.event_id, describe(error)
                    )
                    return
                await asyncio.sleep(wait_s)
            else:
                if reason is not None:
                    log.warning("webhook endpoint %s is disabled: %s", claim.endpoint_id, reason)
                return

    async def _clean(self) -> None:
        """Once a period, delete deliveries past their retention."""
        if time.monotonic() - self._cleaned_s < CLEANING_PERIOD_S:
            return
        try:
            deleted = await self._deliveries.delete_old(unix_now_ms() - self._settings.keep_days * _DAY_MS)
        except SQL_ERRORS as error:
            log.warning("cannot delete old webhook deliveries, will retry: %s", describe(error))
            deleted = 0
        if deleted < DELETE_ROWS:
            self._cleaned_s = time.monotonic()
