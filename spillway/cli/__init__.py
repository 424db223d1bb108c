"""The ``spillway`` command: which commands there are. What they do is in the modules beside this one."""

import typer

from spillway.cli import bench, keys, processes, setup
from spillway.cli.dead_letters import dead_letters
from spillway.cli.usage import usage

app = typer.Typer(
    name="spillway",
    help="A multi-cloud LLM gateway: one OpenAI-compatible endpoint, a queue, and GPU workers anywhere.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("up")(processes.up)
app.command("gateway")(processes.gateway)
app.command("worker")(processes.worker)
app.command("ledger")(processes.ledger)
app.command("usage")(usage)
app.command("dead-letters")(dead_letters)

keys_app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)
keys_app.command("create")(keys.create)
keys_app.command("list")(keys.list_)
keys_app.command("revoke")(keys.revoke)
app.add_typer(keys_app, name="keys")

db_app = typer.Typer(help="The usage and key database.", no_args_is_help=True)
db_app.command("upgrade")(setup.db_upgrade)
db_app.command("check-rollups")(setup.db_check_rollups)
app.add_typer(db_app, name="db")

config_app = typer.Typer(help="The configuration file.", no_args_is_help=True)
config_app.command("check")(setup.config_check)
app.add_typer(config_app, name="config")

bench_app = typer.Typer(help="Measure how fast an engine or an endpoint is.", no_args_is_help=True)
bench_app.command("engine")(bench.engine)
app.add_typer(bench_app, name="bench")
