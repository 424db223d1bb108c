"""Tables of webhooks: who is told, what is on its way, and which budgets' thresholds have been told."""

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from db.models import Base, WordList


class WebhookEndpointRow(Base):
    """A URL that a team's events are sent to."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index(None, "team_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)  # "wh_…"
    team_id: Mapped[str]  # TeamRow.id
    url: Mapped[str]
    event_types: Mapped[tuple[str, ...]] = mapped_column(WordList)  # of ledger.webhooks.events.EVENT_TYPES
    secret: Mapped[str]  # sealed (ledger.webhooks.secrets)
    previous_secret: Mapped[str | None]  # sealed; after a rotation, deliveries are signed by it, too, for a while
    previous_until_unix_ms: Mapped[int | None]
    disabled_reason: Mapped[str | None]  # NULL: enabled
    failing_since_unix_ms: Mapped[int | None]  # of the first failure since the last success; NULL: none
    created_unix_ms: Mapped[int]


class WebhookDeliveryRow(Base):
    """One event on its way to one endpoint, and what became of it; deleted some days later."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index(None, "due_unix_ms"),
        Index(None, "endpoint_id", "created_unix_ms"),
        Index(None, "created_unix_ms"),
    )

    event_id: Mapped[str] = mapped_column(primary_key=True)  # "evt_…"
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)  # WebhookEndpointRow.id
    event_type: Mapped[str]
    body: Mapped[str]  # the JSON that is sent
    created_unix_ms: Mapped[int]
    # When to send it; while it is being sent, when somebody else may. NULL: it is over.
    due_unix_ms: Mapped[int | None]
    outcome: Mapped[str]  # "waiting" | "delivered" | "failed"
    attempts: Mapped[int]
    attempted_unix_ms: Mapped[int | None]  # the last one
    http_status: Mapped[int | None]  # of the last attempt; NULL: no answer
    error: Mapped[str | None]  # of the last attempt, or why there is none


class WebhookTotalRow(Base):
    """How many attempts ended how, over all time and processes: what the metrics count."""

    __tablename__ = "webhook_totals"

    outcome: Mapped[str] = mapped_column(primary_key=True)  # ledger.webhooks.deliveries.OUTCOMES
    attempts: Mapped[int]


class BudgetNoticeRow(Base):
    """A threshold of a budget that has been reached in a period, so that it is told once."""

    __tablename__ = "budget_notices"

    event_id: Mapped[str] = mapped_column(primary_key=True)  # of account, period and threshold
    account_id: Mapped[str]  # TeamRow.id or ApiKeyRow.id
    period: Mapped[str]  # db.accounts.limits.period_at
    threshold_percent: Mapped[int]
    created_unix_ms: Mapped[int]
    message: Mapped[bytes | None]  # what is to be published (ledger.webhooks.events); NULL: it has been
