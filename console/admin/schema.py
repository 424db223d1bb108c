"""The bodies of the admin API. In a change, an omitted field stays as it is; null removes a limit."""

from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from db.accounts.audit import MAX_PAGE_ROWS
from db.accounts.checks import MAX_NUMBER
from db.accounts.keys import DEFAULT_GRACE_S
from db.accounts.principal import DEFAULT_TEAM_ID, INFERENCE, BudgetPeriod
from db.accounts.teams import DEFAULT_ORGANISATION_ID
from db.money import nano_usd
from gateway.api.fields import Body

MAX_BUDGET_USD: Final = 10**9

UnixMs = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Usd = Annotated[Decimal, Field(gt=0, le=MAX_BUDGET_USD, decimal_places=9)]


class AdminBody(Body):
    """A body of the admin API, which refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")

    def changes(self) -> dict[str, Any]:
        """Return the given fields under their column names."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if "budget_usd" in given:
            given["budget_nano_usd"] = nano_usd(given.pop("budget_usd"))
        return given


class PolicyBody(AdminBody):
    """Limits and consents of a team (for all its keys together) or of a key (on top of its team's)."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    budget_usd: Usd | None = None
    budget_period: BudgetPeriod | None = None
    weight: float | None = None
    priority: Literal["interactive", "batch"] | None = None
    log_payload: bool | None = None
    train_ok: bool | None = None
    redact: bool | None = None
    retention_days: int | None = None
    allow_hosted: tuple[str, ...] | None = None  # null: unspecified; []: none
    trusted_only: bool | None = None


class OrganisationBody(AdminBody):
    """An organization."""

    name: str


class NewTeam(PolicyBody):
    """A new team."""

    name: str
    organisation: str = DEFAULT_ORGANISATION_ID  # id or name


class TeamChanges(PolicyBody):
    """Changes of a team."""

    name: str = ""
    organisation: str = ""


class NewKey(PolicyBody):
    """A new key."""

    name: str
    team: str = DEFAULT_TEAM_ID  # id or name
    scopes: tuple[str, ...] = (INFERENCE,)
    models: tuple[str, ...] | None = None  # null: all
    expires_unix_ms: int | None = None


class KeyChanges(PolicyBody):
    """Changes of a key."""

    name: str = ""
    team: str = ""
    scopes: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    expires_unix_ms: int | None = None


class Rotation(AdminBody):
    """Options of a rotation."""

    grace_s: int = DEFAULT_GRACE_S  # how long the previous token or secret stays valid


class AuditQuery(BaseModel):
    """A filter of the audit log; omitted fields match everything."""

    model_config = ConfigDict(extra="forbid")

    subject: str | None = None  # the id of the changed object
    actor: str | None = None
    since_unix_ms: UnixMs | None = None
    until_unix_ms: UnixMs | None = None  # exclusive
    after: str | None = None  # the last id of the previous page
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS)] = 100


class NewWebhook(AdminBody):
    """A new webhook endpoint."""

    team: str = DEFAULT_TEAM_ID  # id or name
    url: str
    event_types: tuple[str, ...]


class WebhookChanges(AdminBody):
    """Changes of a webhook endpoint."""

    url: str = ""
    event_types: tuple[str, ...] = ()
    enabled: bool = True


class WebhookTest(AdminBody):
    """Options of a test event."""

    event_type: str | None = None  # null: the first of the endpoint's


class DeliveriesQuery(BaseModel):
    """How many deliveries to list."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS)] = 20


ADMIN_BODIES: Final = (
    OrganisationBody,
    NewTeam,
    TeamChanges,
    NewKey,
    KeyChanges,
    Rotation,
    NewWebhook,
    WebhookChanges,
    WebhookTest,
)
