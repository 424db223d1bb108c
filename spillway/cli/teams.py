"""``spillway teams`` and ``spillway organisations``: shared limits, and their payers."""

import json
from typing import Annotated

import typer

from console.admin.views import organisation_view, team_view
from db.accounts import teams
from db.accounts.principal import policy_of
from spillway.cli.connections import database
from spillway.cli.context import ConfigOption, DataOption, out, run_async, running_or_config
from spillway.cli.keys import JsonOption, notify_gateways, print_table, show_facts
from spillway.cli.policy import (
    BatchOption,
    BudgetOption,
    ConcurrentOption,
    HostedOption,
    LogPayloadOption,
    RedactOption,
    RetentionOption,
    RpmOption,
    TpmOption,
    TrainOption,
    TrustedOption,
    WeightOption,
    limits_text,
    local_time,
    policy_changes,
    this_actor,
)

ReferenceArgument = Annotated[str, typer.Argument(help="The team's or organisation's id or name.")]
OrganisationOption = Annotated[str | None, typer.Option("--organisation", "-o", help="Its organisation's name or id.")]


def create(
    name: Annotated[str, typer.Argument(help="Unique among the teams.")],
    organisation: OrganisationOption = None,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrent: ConcurrentOption = None,
    budget: BudgetOption = None,
    weight: WeightOption = None,
    batch_only: BatchOption = None,
    log_payload: LogPayloadOption = None,
    train_ok: TrainOption = None,
    redact: RedactOption = None,
    retention_days: RetentionOption = None,
    allow_hosted: HostedOption = None,
    trusted_only: TrustedOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create a team. Its limits apply to all its keys together; its weight is its share relative to other teams."""
    resolved = running_or_config(config, data)
    changes = policy_changes(
        rpm=rpm, tpm=tpm, concurrent=concurrent, budget=budget, weight=weight, batch_only=batch_only,
        log_payload=log_payload, train_ok=train_ok, redact=redact, retention_days=retention_days,
        allow_hosted=allow_hosted,
        trusted_only=trusted_only,
    )  # fmt: skip

    async def main() -> None:
        owner = organisation or teams.DEFAULT_ORGANISATION_ID
        async with database(resolved) as engine:
            team = await teams.create_team(engine, name, this_actor(), owner, policy_of(changes))
        show_facts(team_view(team), as_json=as_json)

    run_async(main)


def update(
    reference: ReferenceArgument,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    organisation: OrganisationOption = None,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrent: ConcurrentOption = None,
    budget: BudgetOption = None,
    weight: WeightOption = None,
    batch_only: BatchOption = None,
    log_payload: LogPayloadOption = None,
    train_ok: TrainOption = None,
    redact: RedactOption = None,
    retention_days: RetentionOption = None,
    allow_hosted: HostedOption = None,
    trusted_only: TrustedOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Change a team; options not given stay the same. Running gateways apply the change to all its keys immediately."""
    resolved = running_or_config(config, data)
    changes = policy_changes(
        rpm=rpm, tpm=tpm, concurrent=concurrent, budget=budget, weight=weight, batch_only=batch_only,
        log_payload=log_payload, train_ok=train_ok, redact=redact, retention_days=retention_days,
        allow_hosted=allow_hosted,
        trusted_only=trusted_only,
    )  # fmt: skip
    changes |= {field: value for field, value in (("name", name), ("organisation", organisation)) if value is not None}

    async def main() -> None:
        async with database(resolved) as engine:
            team = await teams.update_team(engine, reference, changes, this_actor())
        show_facts(team_view(team), as_json=as_json)
        await notify_gateways(resolved)

    run_async(main)


def list_(as_json: JsonOption = False, config: ConfigOption = None, data: DataOption = None) -> None:
    """List teams."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            found = await teams.list_teams(engine)
        if as_json:
            out.print_json(json.dumps([team_view(team) for team in found]))
            return
        rows = (
            (t.team_id, t.name, t.organisation_name, limits_text(t.policy), local_time(t.created_unix_ms))
            for t in found
        )
        print_table(("id", "name", "organisation", "limits", "created"), rows)

    run_async(main)


def show(
    reference: ReferenceArgument, as_json: JsonOption = False, config: ConfigOption = None, data: DataOption = None
) -> None:
    """Show the details of a team."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine, engine.connect() as connection:
            team = await teams.find_team(connection, reference)
        show_facts(team_view(team), as_json=as_json)

    run_async(main)


def create_organisation(
    name: Annotated[str, typer.Argument(help="Unique among the organisations.")],
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create an organisation."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            made = await teams.create_organisation(engine, name, this_actor())
        show_facts(organisation_view(made), as_json=as_json)

    run_async(main)


def rename_organisation(
    reference: ReferenceArgument,
    name: Annotated[str, typer.Argument(help="The new name.")],
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Rename an organisation."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            renamed = await teams.rename_organisation(engine, reference, name, this_actor())
        show_facts(organisation_view(renamed), as_json=as_json)

    run_async(main)


def list_organisations(as_json: JsonOption = False, config: ConfigOption = None, data: DataOption = None) -> None:
    """List organisations."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            found = await teams.list_organisations(engine)
        if as_json:
            out.print_json(json.dumps([organisation_view(organisation) for organisation in found]))
            return
        rows = ((o.organisation_id, o.name, local_time(o.created_unix_ms)) for o in found)
        print_table(("id", "name", "created"), rows)

    run_async(main)
