"""The ``spillway`` command: a table of its subcommands, which the modules beside this one implement.

A command's module is imported when the command is called. So nothing here, and no ``--help`` of a group, imports torch,
SQLAlchemy or FastAPI, and a worker does not wait for what only the gateway needs.
"""

import contextlib
import gc
import importlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Command(NamedTuple):
    """A command that is not imported yet."""

    place: str  # module:function in this package
    help: str  # the first paragraph of the function's docstring

    def load(self, name: str | None) -> Any:  # noqa: ANN401  # Typer's types are private
        """Import it."""
        module, _, function = self.place.partition(":")
        alone = typer.Typer(add_completion=False)
        with _no_garbage_yet():
            alone.command(name)(getattr(importlib.import_module(f"{__name__}.{module}"), function))
        return typer.main.get_command(alone)


@contextlib.contextmanager
def _no_garbage_yet() -> Iterator[None]:
    """Do not look for garbage: while modules are imported there is none, and looking takes a seventh of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Group(NamedTuple):
    """Commands below one name."""

    help: str
    commands: Mapping[str, Command]


COMMANDS: Final[Mapping[str, Command | Group]] = {
    "up": Command(
        "up:up",
        "Run all of Spillway on this machine: NATS, gateway, ledger and workers. Ctrl-C shuts it down in order.",
    ),
    "init": Command(
        "init:init", "Write a configuration file from a template: demo, vllm or two-clouds. Overwrites nothing."
    ),
    "status": Command(
        "status:status",
        "Show what runs: gateway, queue, ledger, models, and the workers of each pool with what they wait for.",
    ),
    "models": Command(
        "models:models",
        "List the models of the configuration: their names, context, price, pools, and whether they are ready.",
    ),
    "gateway": Command("gateway:gateway", "Run one gateway: the HTTP endpoint."),
    "worker": Command(
        "worker:worker",
        "Run one worker of a pool, which pulls jobs for its engine. Only needs an outbound connection to NATS.",
    ),
    "ledger": Command(
        "ledger:ledger",
        "Run one ledger writer: usage records from the queue into SQL, and webhooks. Several may run at the same time.",
    ),
    "usage": Command("usage:usage", "Show requests, tokens, money, TTFT, TPOT and queue wait."),
    "dead-letters": Command(
        "set_aside:dead_letters",
        "List requests that failed on every worker that tried them, with each attempt's reason.",
    ),
    "parked": Command(
        "set_aside:parked",
        "List usage records that were not understood, or that the database has refused.",
    ),
    "plan": Command(
        "simulate:plan",
        "Estimate a month's cost for each way to rent machines (default: the example of our docs).",
    ),
    "audit": Command("admin:audit", "Show changes to organisations, teams and keys with their actors, newest first."),
    "limits": Group(
        "Limits of keys and teams.",
        {
            "recount": Command(
                "limits:recount",
                "Compare the spending that budgets count in their current period with the ledger, and correct it.",
            ),
        },
    ),
    "keys": Group(
        "API keys and their permissions.",
        {
            "create": Command(
                "keys:create",
                "Create an API key and print it. Only its hash is stored, so it cannot be shown again.",
            ),
            "update": Command(
                "keys:update",
                "Change an API key; options not given stay the same. Running gateways apply the change immediately.",
            ),
            "rotate": Command(
                "keys:rotate",
                "Give an API key a new plaintext and print it. The old one stays valid for the grace period.",
            ),
            "list": Command("keys:list_", "List API keys."),
            "show": Command("keys:show", "Show the details of an API key, without its plaintext, which is not stored."),
            "revoke": Command(
                "keys:revoke",
                "Revoke an API key: running gateways refuse it immediately, or within half a minute if the queue "
                "server is down.",
            ),
        },
    ),
    "teams": Group(
        "Teams: keys that share limits and a budget.",
        {
            "create": Command(
                "teams:create",
                "Create a team. Its limits apply to all its keys together; its weight is its share relative to other "
                "teams.",
            ),
            "update": Command(
                "teams:update",
                "Change a team; options not given stay the same. Running gateways apply the change to all its keys "
                "immediately.",
            ),
            "list": Command("teams:list_", "List teams."),
            "show": Command("teams:show", "Show the details of a team."),
        },
    ),
    "organisations": Group(
        "Organisations: the owners of teams.",
        {
            "create": Command("teams:create_organisation", "Create an organisation."),
            "rename": Command("teams:rename_organisation", "Rename an organisation."),
            "list": Command("teams:list_organisations", "List organisations."),
        },
    ),
    "batch": Group(
        "Files of requests as jobs, at any gateway.",
        {
            "submit": Command(
                "batch:submit", "Upload a file of requests and make a batch of it. Prints the batch's id."
            ),
            "list": Command("batch:list_", "List the batches of the key's team."),
            "show": Command("batch:show", "Show a batch, perhaps once it is over."),
            "cancel": Command("batch:cancel", "Cancel a batch. What is done stays, in its files."),
            "download": Command("batch:download", "Download the answers of a batch that is over, or what failed."),
        },
    ),
    "webhooks": Group(
        "Endpoints that teams' events are sent to.",
        {
            "create": Command(
                "webhooks:create",
                "Create an endpoint of a team, by default for all types of events. Its secret is shown once.",
            ),
            "list": Command("webhooks:list_", "List endpoints."),
            "show": Command("webhooks:show", "Show an endpoint, without its secret."),
            "update": Command("webhooks:update", "Change an endpoint; options not given stay the same."),
            "rotate": Command("webhooks:rotate", "Give an endpoint a new secret, which is shown once."),
            "test": Command(
                "webhooks:send_test",
                "Send an event about an object that does not exist; `deliveries` shows how it went.",
            ),
            "deliveries": Command("webhooks:deliveries", "List the latest deliveries to an endpoint, newest first."),
            "delete": Command("webhooks:delete", "Delete an endpoint with all that is known of its deliveries."),
        },
    ),
    "admin": Group(
        "The login to the pages.",
        {
            "password": Command(
                "admin:password",
                "Set a new password for the pages' local login (user `admin`) and print it. All its sessions end.",
            ),
        },
    ),
    "payloads": Group(
        "Requests and answers stored by consent.",
        {
            "show": Command("payloads:show", "Print a request and its answer as JSON, decrypted."),
            "delete": Command(
                "payloads:delete",
                "Delete payloads permanently. Usage and cost of the requests stay; their content does not.",
            ),
        },
    ),
    "export": Group(
        "Training sets from payloads stored by consent.",
        {
            "finetune": Command(
                "export:finetune",
                "Write conversations as JSON lines for fine-tuning: only with consent at the time of the request and "
                "now.",
            ),
        },
    ),
    "db": Group(
        "The usage and key database.",
        {
            "upgrade": Command(
                "database:upgrade_",
                "Upgrade the database to this version's schema. Safe to run again, and concurrently on several "
                "machines.",
            ),
            "check-rollups": Command(
                "database:check_rollups_",
                "Compare rollups with the sums of the requests. --repair rebuilds the days that differ.",
            ),
        },
    ),
    "config": Group(
        "The configuration file.",
        {
            "check": Command(
                "config:check",
                "Validate a configuration together with the environment; report every invalid key.",
            ),
            "show": Command(
                "config:show", "Show every value of the configuration with the place it is from. Secrets are masked."
            ),
        },
    ),
    "nats": Group(
        "Who may do what at the queue server.",
        {
            "credentials": Command(
                "nats:credentials",
                "Make what is missing of the credentials for each part and each pool of the configuration.",
            ),
            "machine": Command(
                "nats:machine",
                "Make credentials for the workers of one machine, which expire by themselves. No server needs to be "
                "told.",
            ),
        },
    ),
    "queue": Group(
        "Backups of what exists only in the queue.",
        {
            "backup": Command(
                "queue:backup",
                "Copy stored responses, parked records, webhook events, unwritten usage, payloads and dead letters.",
            ),
            "restore": Command(
                "queue:restore", "Create the streams of a backup in an empty queue server, before any gateway starts."
            ),
        },
    ),
    "fleet": Group(
        "How many workers each pool has, and who starts them.",
        {
            "run": Command("fleet:run", "Keep each pool that has a section `fleet` at the size that its work needs."),
            "status": Command(
                "fleet:status",
                "Show each pool's size: decided, serving, starting, draining, and what was lost within a day.",
            ),
            "explain": Command(
                "fleet:explain",
                "Say why pools have the size that they have: each decision in one sentence, and what became of "
                "machines.",
            ),
            "plan": Command(
                "simulate:plan",
                "Estimate a month's cost for each way to rent machines (default: the example of our docs).",
            ),
            "simulate": Command(
                "simulate:simulate",
                "Play days of traffic and spot losses against the fleet's policy: cost, waits, machines, in a minute "
                "or so.",
            ),
        },
    ),
    "bench": Group(
        "Measure the speed of an engine or an endpoint.",
        {
            "engine": Command(
                "bench:engine", "Measure TTFT, TPOT and throughput by prompt length, batch and new tokens."
            ),
            "pool": Command("bench_pool:pool", "Measure a pool's engine, and recommend limits for its configuration."),
        },
    ),
}


class LazyGroup(TyperGroup):
    """Shows the commands of a table; imports the one that is called, or whose options are to be completed."""

    def __init__(self, *, table: Mapping[str, Command | Group] = COMMANDS, **attributes: Any) -> None:  # noqa: ANN401  # as TyperGroup has them
        super().__init__(**attributes)
        self._table = table
        for name, entry in table.items():
            self.commands[name] = (
                LazyGroup(name=name, help=entry.help, table=entry.commands, no_args_is_help=True)
                if isinstance(entry, Group)
                else TyperCommand(name, help=entry.help)
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401  # Typer's types are private
        """Return the name, the command and the arguments that are left for it."""
        name, command, rest = super().resolve_command(ctx, args)
        entry = self._table.get(name or "")
        return name, entry.load(name) if isinstance(entry, Command) else command, rest


app = typer.Typer(name="spillway", pretty_exceptions_show_locals=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from protocol.distribution import version  # noqa: PLC0415  # reads the package's metadata, which takes 20 ms

        typer.echo(f"spillway {version()}")
        raise typer.Exit


@app.callback(cls=LazyGroup, no_args_is_help=True)
def spillway(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A multi-cloud LLM gateway: one OpenAI-compatible endpoint, a queue, and GPU workers anywhere."""
