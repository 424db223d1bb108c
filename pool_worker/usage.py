"""The ledger's record of one attempt."""

from typing import Final, Literal

from msgspec.structs import asdict

from pool_worker.attempt import Attempt
from pool_worker.engines.base import AnyEngine
from pool_worker.settings import WorkerSettings
from protocol.job import PROTOCOL_VERSION, TAKES_MESSAGES, CountedBy, rescue_of
from protocol.usage import AttemptRecord

OUTBOX_RECORDS: Final = 2048  # not yet stored; from there on the worker pulls nothing
Outcome = Literal["ok", "cancelled", "failed"]


def attempt_record(
    settings: WorkerSettings, engine: AnyEngine, attempt: Attempt, outcome: Outcome, error_code: str | None
) -> AttemptRecord:
    """Make the record of an attempt that ends now."""
    timings = attempt.engine_timings()
    return AttemptRecord(
        v=PROTOCOL_VERSION,
        request_id=attempt.job.request_id,
        attempt=attempt.job.attempt,
        worker_id=settings.worker_id,
        pool=settings.pool,
        provider=settings.provider,
        region=settings.region,
        tier=settings.tier,
        engine=engine.name,
        model=attempt.job.model,
        started_unix_ms=attempt.started_unix_ms,
        outcome=outcome,
        error_code=error_code,
        prompt_tokens=attempt.prompt_tokens,
        cached_tokens=attempt.cached_tokens,
        completion_tokens=attempt.completion_tokens,
        queue_ms=attempt.queue_ms,
        ttft_ms=attempt.ttft_ms,
        total_ms=attempt.elapsed_ms(),
        usd_per_hour=settings.usd_per_hour,
        resumed_tokens=sum(point.used_tokens for point in attempt.job.resume),
        received_unix_ms=attempt.job.accepted_unix_ms,
        counted_by=_counted_by(engine, attempt),
        rescue=rescue_of(attempt.job, engine.takes),
        **(asdict(timings) if timings else {}),
        **(asdict(attempt.job.origin) if attempt.job.origin else {}),
    )


def _counted_by(engine: AnyEngine, attempt: Attempt) -> CountedBy:
    if engine.takes != TAKES_MESSAGES:
        return engine.counted_by
    return "provider" if attempt.is_counted_by_provider else "estimate"
