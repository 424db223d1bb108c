"""Checks of a job before this worker accepts it."""

import logging
from collections.abc import Mapping
from typing import Final

from pool_worker.engines.base import AnyEngine
from pool_worker.generation import can_go_on
from pool_worker.peers import Peers
from pool_worker.settings import WorkerSettings
from protocol.job import NO_TOKENIZER, Job, Revision
from protocol.nats.pull import Delivery

AVOID_DELIVERIES: Final = 3  # a job that has come so often is run, avoided or not

log = logging.getLogger(__name__)


class JobFilter:
    """Reports why a job is left to other workers."""

    def __init__(
        self, settings: WorkerSettings, engine: AnyEngine, peers: Peers, revisions: Mapping[str, Revision]
    ) -> None:
        """``revisions``: of the worker's models."""
        self._settings = settings
        self._engine = engine
        self._peers = peers
        self._revisions = revisions

    def should_avoid(self, job: Job, delivery: Delivery) -> bool:
        """Report whether the job failed here before, and another worker may still be found for it."""
        is_unwanted = self._settings.worker_id in job.avoid and delivery.deliveries <= AVOID_DELIVERIES
        return is_unwanted and self._peers.others_serving(job.model, job.revision.weights)

    def must_not_leave(self, job: Job) -> bool:
        """Report whether the engine is a provider's API that may not get this job: gateways never send such one.

        It is looked at here all the same, at the last moment before anything leaves the installation.
        """
        if not self._settings.is_hosted or self._settings.provider in job.hosted:
            return False
        log.error("request %s may not go to %s, and is left to others", job.request_id, self._settings.provider)
        return True

    def is_foreign(self, job: Job) -> bool:
        """Report whether the answer was begun with other weights, or the job has no input for this engine."""
        engine, own = self._engine, self._revisions[job.model]
        if not can_go_on(job, engine):
            return True
        return not (_agree(job.revision.weights, own.weights) and _agree(job.revision.tokenizer, own.tokenizer))

    def has_unknown_tokenizer(self, job: Job) -> bool:
        """Report whether no worker has the tokenizer that made the prompt's token ids: a gateway has an old card."""
        own, asked = self._revisions[job.model].tokenizer, job.revision.tokenizer
        if asked == NO_TOKENIZER:
            return False
        return not (_agree(asked, own) or self._peers.others_reading(job.model, asked))


def _agree(asked: str, own: str) -> bool:
    return not (asked and own) or asked == own
