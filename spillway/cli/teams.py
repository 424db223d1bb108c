"""``spillway teams`` and ``spillway organisations``: teams with shared limits, and their organizations."""

from typing import Annotated, Final

import typer

from console.admin.views import organisation_view, team_view
from db.accounts import teams
from db.accounts.principal import policy_of
from spillway.cli.account_options import NewTeam, TeamChanges, limits_text
from spillway.cli.connections import database
from spillway.cli.context import ResolvedConfig, command, this_actor
from spillway.cli.keys import notify_gateways, print_warnings, warnings_of
from spillway.cli.output import JsonOption, local_time, print_changed, print_object, print_objects

ReferenceArgument = Annotated[str, typer.Argument(help="The team's or organization's id or name.")]

_TEAM_COLUMNS: Final = {
    "id": lambda team: team.team_id,
    "name": lambda team: team.name,
    "organisation": lambda team: team.organisation_name,
    "limits": lambda team: limits_text(team.policy),
    "created": lambda team: local_time(team.created_unix_ms),
}
_ORGANISATION_COLUMNS: Final = {
    "id": lambda organisation: organisation.organisation_id,
    "name": lambda organisation: organisation.name,
    "created": lambda organisation: local_time(organisation.created_unix_ms),
}


@command
async def create(
    name: Annotated[str, typer.Argument(help="A name for the team, unique among teams.")],
    *,
    fields: NewTeam,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Create a team. Its limits apply to all its keys together; its weight is its share relative to other teams."""
    owner = fields.get("organisation") or teams.DEFAULT_ORGANISATION_ID
    async with database(config) as engine:
        team = await teams.create_team(engine, name, this_actor(), owner, policy_of(fields))
        warnings = await warnings_of(config, engine, team)
    print_object(team_view(team), as_json=as_json)
    print_warnings(warnings)


@command
async def update(
    reference: ReferenceArgument, *, changes: TeamChanges, as_json: JsonOption = False, config: ResolvedConfig
) -> None:
    """Change a team; options not given stay the same. Running gateways apply the change to all its keys immediately."""
    async with database(config) as engine:
        async with engine.connect() as connection:
            before = await teams.find_team(connection, reference)
        team = await teams.update_team(engine, before.team_id, changes, this_actor())
        warnings = await warnings_of(config, engine, team)
    print_changed(team_view(before), team_view(team), as_json=as_json)
    print_warnings(warnings)
    await notify_gateways(config)


@command
async def list_(*, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """List teams."""
    async with database(config) as engine:
        found = await teams.list_teams(engine)
    print_objects(found, team_view, _TEAM_COLUMNS, as_json=as_json)


@command
async def show(reference: ReferenceArgument, *, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """Show the details of a team."""
    async with database(config) as engine, engine.connect() as connection:
        print_object(team_view(await teams.find_team(connection, reference)), as_json=as_json)


@command
async def create_organisation(
    name: Annotated[str, typer.Argument(help="A name for the organization, unique among organizations.")],
    *,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Create an organization."""
    async with database(config) as engine:
        created = await teams.create_organisation(engine, name, this_actor())
    print_object(organisation_view(created), as_json=as_json)


@command
async def rename_organisation(
    reference: ReferenceArgument,
    name: Annotated[str, typer.Argument(help="The new name.")],
    *,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Rename an organization."""
    async with database(config) as engine:
        async with engine.connect() as connection:
            before = await teams.find_organisation(connection, reference)
        renamed = await teams.rename_organisation(engine, before.organisation_id, name, this_actor())
    print_changed(organisation_view(before), organisation_view(renamed), as_json=as_json)


@command
async def list_organisations(*, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """List organizations."""
    async with database(config) as engine:
        found = await teams.list_organisations(engine)
    print_objects(found, organisation_view, _ORGANISATION_COLUMNS, as_json=as_json)
