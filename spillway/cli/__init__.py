"""The ``spillway`` command: a table of its subcommands. The other modules of this package implement them.

A command's module is imported when the command is called. Neither this module nor the ``--help`` of a group imports
torch, SQLAlchemy or FastAPI, and a worker does not load the gateway's dependencies.
"""

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Command(NamedTuple):
    """A command that is not imported yet."""

    place: str  # module:function in this package
    help: str  # the first paragraph of the function's docstring

    def load(self, name: str | None) -> Any:  # noqa: ANN401  # Typer's types are private
        """Import it."""
        from protocol.process import collector_paused  # noqa: PLC0415 - pydantic, which --help does not need

        module, _, function = self.place.partition(":")
        alone = typer.Typer(add_completion=False)
        with collector_paused():
            alone.command(name)(getattr(importlib.import_module(f"{__name__}.{module}"), function))
        return typer.main.get_command(alone)


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
        "Show the status of the gateway, queue, ledger and models, and of each pool's workers.",
    ),
    "models": Command(
        "models:models",
        "List the models of the configuration: their names, context, price, pools, and whether they are ready.",
    ),
    "gateway": Command("gateway:gateway", "Run one gateway: the HTTP endpoint."),
    "worker": Command(
        "worker:worker",
        "Run one worker of a pool. It pulls jobs for its engine and needs only an outbound connection to NATS.",
    ),
    "ledger": Command(
        "ledger:ledger",
        "Run one ledger writer: it writes usage records to SQL and delivers webhooks. You can run several.",
    ),
    "usage": Command("usage:usage", "Show requests, tokens, cost, TTFT, TPOT and queue wait."),
    "dead-letters": Command(
        "set_aside:dead_letters",
        "List requests that failed on every attempt, with the reason of each attempt.",
    ),
    "parked": Command(
        "set_aside:parked",
        "List usage records that could not be decoded or that the database rejected.",
    ),
    "plan": Command(
        "simulate:plan",
        "Estimate the monthly cost of each machine offer. Without options: the example in docs/explanation/fleet.md.",
    ),
    "audit": Command("admin:audit", "Show changes to organizations, teams and keys with their actors, newest first."),
    "limits": Group(
        "Limits of keys and teams.",
        {
            "recount": Command(
                "limits:recount",
                "Compare each budget's spending in its current period with the ledger, and correct it.",
            ),
        },
    ),
    "keys": Group(
        "API keys and their permissions.",
        {
            "create": Command(
                "keys:create",
                "Create an API key and print it. Only its hash is stored: the key cannot be shown again.",
            ),
            "update": Command(
                "keys:update",
                "Change an API key; options not given stay the same. Running gateways apply the change immediately.",
            ),
            "rotate": Command(
                "keys:rotate",
                "Give an API key a new secret and print it. The old secret stays valid for the grace period.",
            ),
            "list": Command("keys:list_", "List API keys."),
            "show": Command("keys:show", "Show the details of an API key. Its secret is not stored and not shown."),
            "revoke": Command(
                "keys:revoke",
                "Revoke an API key. Running gateways reject it immediately, or within 30 seconds if the queue server "
                "is down.",
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
        "Organizations: the owners of teams.",
        {
            "create": Command("teams:create_organisation", "Create an organization."),
            "rename": Command("teams:rename_organisation", "Rename an organization."),
            "list": Command("teams:list_organisations", "List organizations."),
        },
    ),
    "batch": Group(
        "Batches: files of requests, submitted to any gateway.",
        {
            "submit": Command(
                "batch:submit", "Upload a file of requests, create a batch from it, and print the batch's id."
            ),
            "list": Command("batch:list_", "List the batches of the key's team."),
            "show": Command("batch:show", "Show a batch. With --wait: after it has ended."),
            "cancel": Command("batch:cancel", "Cancel a batch. Its files keep the lines that are already done."),
            "download": Command("batch:download", "Download the output file of a batch, or its error file."),
        },
    ),
    "webhooks": Group(
        "Webhook endpoints of teams.",
        {
            "create": Command(
                "webhooks:create",
                "Create an endpoint for a team, by default for all event types. Its secret is shown once.",
            ),
            "list": Command("webhooks:list_", "List endpoints."),
            "show": Command("webhooks:show", "Show an endpoint, without its secret."),
            "update": Command("webhooks:update", "Change an endpoint; options not given stay the same."),
            "rotate": Command("webhooks:rotate", "Give an endpoint a new secret, which is shown once."),
            "test": Command(
                "webhooks:send_test",
                "Send a test event about an object that does not exist. `deliveries` shows the outcome.",
            ),
            "deliveries": Command("webhooks:deliveries", "List the latest deliveries to an endpoint, newest first."),
            "delete": Command("webhooks:delete", "Delete an endpoint and the records of its deliveries."),
        },
    ),
    "admin": Group(
        "The login to the pages.",
        {
            "password": Command(
                "admin:password",
                "Set and print a new password for the local login (user `admin`). All its sessions end.",
            ),
        },
    ),
    "payloads": Group(
        "Requests and answers stored with consent.",
        {
            "show": Command("payloads:show", "Decrypt a request and its answer and print them as JSON."),
            "delete": Command(
                "payloads:delete",
                "Delete payloads permanently. Usage and cost of the requests are kept.",
            ),
        },
    ),
    "export": Group(
        "Training sets from payloads stored with consent.",
        {
            "finetune": Command(
                "export:finetune",
                "Write conversations as JSON lines for fine-tuning. Requires consent at the time of the request and "
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
                "Validate the configuration file and the environment together, and report every invalid key.",
            ),
            "show": Command(
                "config:show", "Show every value of the configuration and where it comes from. Secrets are masked."
            ),
        },
    ),
    "nats": Group(
        "Users and permissions at the queue server.",
        {
            "credentials": Command(
                "nats:credentials",
                "Create missing credentials for each part and each pool of the configuration.",
            ),
            "machine": Command(
                "nats:machine",
                "Create credentials that expire, for the workers of one machine. Servers need no reload.",
            ),
        },
    ),
    "queue": Group(
        "Backups of data that exists only in the queue.",
        {
            "backup": Command(
                "queue:backup",
                "Copy stored responses, parked records, webhook events, unwritten usage, payloads and dead letters.",
            ),
            "restore": Command(
                "queue:restore", "Restore a backup into an empty queue server. Run it before you start any gateway."
            ),
        },
    ),
    "fleet": Group(
        "The fleet controller, which scales each pool's workers.",
        {
            "run": Command("fleet:run", "Run the fleet controller, which scales each pool that has a `fleet` section."),
            "status": Command(
                "fleet:status",
                "Show each pool's machines: decided, serving, starting, draining, and lost in the last 24 hours.",
            ),
            "explain": Command(
                "fleet:explain",
                "Explain the size of pools: each scaling decision in one sentence, and each machine's state.",
            ),
            "plan": Command(
                "simulate:plan",
                "Estimate the monthly cost of each machine offer. Without options: the example in "
                "docs/explanation/fleet.md.",
            ),
            "simulate": Command(
                "simulate:simulate",
                "Simulate the fleet's policy over days of traffic and spot losses: cost, waits and machines. Takes "
                "about a minute.",
            ),
        },
    ),
    "bench": Group(
        "Measure the speed of an engine or an endpoint.",
        {
            "engine": Command(
                "bench:engine", "Measure TTFT, TPOT and throughput by prompt length, batch and new tokens."
            ),
            "pool": Command("bench_pool:pool", "Measure a pool's engine and recommend limits for its configuration."),
        },
    ),
}


class LazyGroup(TyperGroup):
    """Shows the commands of a table; imports only the one that is called or whose options are completed."""

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
        """Return the command's name, the command and its arguments."""
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
