"""The ``spillway`` command and its subcommands, which the modules beside this one implement."""

import typer

from spillway.cli import (
    admin,
    batch,
    bench,
    bench_pool,
    export,
    fleet,
    keys,
    limits,
    nats,
    payloads,
    processes,
    setup,
    simulate,
    teams,
    webhooks,
)
from spillway.cli.dead_letters import dead_letters
from spillway.cli.parked import parked
from spillway.cli.usage import usage
from spillway.cli.worker import worker

app = typer.Typer(
    name="spillway",
    help="A multi-cloud LLM gateway: one OpenAI-compatible endpoint, a queue, and GPU workers anywhere.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("up")(processes.up)
app.command("gateway")(processes.gateway)
app.command("worker")(worker)
app.command("ledger")(processes.ledger)
app.command("usage")(usage)
app.command("dead-letters")(dead_letters)
app.command("parked")(parked)
app.command("plan")(simulate.plan)

limits_app = typer.Typer(help="Limits of keys and teams.", no_args_is_help=True)
limits_app.command("recount")(limits.recount)
app.add_typer(limits_app, name="limits")

app.command("audit")(admin.audit)

keys_app = typer.Typer(help="API keys and their permissions.", no_args_is_help=True)
keys_app.command("create")(keys.create)
keys_app.command("update")(keys.update)
keys_app.command("rotate")(keys.rotate)
keys_app.command("list")(keys.list_)
keys_app.command("show")(keys.show)
keys_app.command("revoke")(keys.revoke)
app.add_typer(keys_app, name="keys")

teams_app = typer.Typer(help="Teams: keys that share limits and a budget.", no_args_is_help=True)
teams_app.command("create")(teams.create)
teams_app.command("update")(teams.update)
teams_app.command("list")(teams.list_)
teams_app.command("show")(teams.show)
app.add_typer(teams_app, name="teams")

organisations_app = typer.Typer(help="Organisations: the owners of teams.", no_args_is_help=True)
organisations_app.command("create")(teams.create_organisation)
organisations_app.command("rename")(teams.rename_organisation)
organisations_app.command("list")(teams.list_organisations)
app.add_typer(organisations_app, name="organisations")

batch_app = typer.Typer(help="Files of requests as jobs, at any gateway.", no_args_is_help=True)
batch_app.command("submit")(batch.submit)
batch_app.command("list")(batch.list_)
batch_app.command("show")(batch.show)
batch_app.command("cancel")(batch.cancel)
batch_app.command("download")(batch.download)
app.add_typer(batch_app, name="batch")

webhooks_app = typer.Typer(help="Endpoints that teams' events are sent to.", no_args_is_help=True)
webhooks_app.command("create")(webhooks.create)
webhooks_app.command("list")(webhooks.list_)
webhooks_app.command("show")(webhooks.show)
webhooks_app.command("update")(webhooks.update)
webhooks_app.command("rotate")(webhooks.rotate)
webhooks_app.command("test")(webhooks.send_test)
webhooks_app.command("deliveries")(webhooks.deliveries)
webhooks_app.command("delete")(webhooks.delete)
app.add_typer(webhooks_app, name="webhooks")

admin_app = typer.Typer(help="The login to the pages.", no_args_is_help=True)
admin_app.command("password")(admin.password)
app.add_typer(admin_app, name="admin")

payloads_app = typer.Typer(help="Requests and answers stored by consent.", no_args_is_help=True)
payloads_app.command("show")(payloads.show)
payloads_app.command("delete")(payloads.delete)
app.add_typer(payloads_app, name="payloads")

export_app = typer.Typer(help="Training sets from payloads stored by consent.", no_args_is_help=True)
export_app.command("finetune")(export.finetune)
app.add_typer(export_app, name="export")

db_app = typer.Typer(help="The usage and key database.", no_args_is_help=True)
db_app.command("upgrade")(setup.db_upgrade)
db_app.command("check-rollups")(setup.db_check_rollups)
app.add_typer(db_app, name="db")

config_app = typer.Typer(help="The configuration file.", no_args_is_help=True)
config_app.command("check")(setup.config_check)
app.add_typer(config_app, name="config")

nats_app = typer.Typer(help="Who may do what at the queue server.", no_args_is_help=True)
nats_app.command("credentials")(nats.credentials)
nats_app.command("machine")(nats.machine)
app.add_typer(nats_app, name="nats")

fleet_app = typer.Typer(help="How many workers each pool has, and who starts them.", no_args_is_help=True)
fleet_app.command("run")(fleet.run)
fleet_app.command("status")(fleet.status)
fleet_app.command("explain")(fleet.explain)
fleet_app.command("plan")(simulate.plan)
fleet_app.command("simulate")(simulate.simulate)
app.add_typer(fleet_app, name="fleet")

bench_app = typer.Typer(help="Measure the speed of an engine or an endpoint.", no_args_is_help=True)
bench_app.command("engine")(bench.engine)
bench_app.command("pool")(bench_pool.pool)
app.add_typer(bench_app, name="bench")
