"""``spillway nats``: users and permissions at the queue server."""

from pathlib import Path
from typing import Annotated, Final

import typer

from protocol.nats.access import PARTS
from spillway.cli.context import ConfigOption, DataOption, fail, out, resolve_config
from spillway.config import Config
from spillway.nats_accounts import Authority, AuthorityError, Pool, check_name, of_pool

FOLDER_NAME: Final = "nats-credentials"  # in the data folder
HOUR_S: Final = 3600

FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help=f"Folder of keys and credentials. Default: {FOLDER_NAME} in the data folder."),
]


def credentials(
    folder: FolderOption = None,
    rotate: Annotated[
        list[str] | None,
        typer.Option(
            "--rotate",
            metavar="NAME",
            help="Create new credentials; earlier ones stay valid. Repeatable. 'all': every part and pool.",
        ),
    ] = None,
    retire: Annotated[
        list[str] | None,
        typer.Option(
            "--retire",
            metavar="NAME",
            help="Revoke all credentials of this name but the newest. Repeatable. 'all': every part and pool.",
        ),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option(
            "--revoke",
            metavar="NAME",
            help="Revoke all credentials of this name, for example of a lost machine. Repeatable.",
        ),
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create missing credentials for each part and each pool of the configuration.

    Also writes nats-accounts.conf, which holds the accounts and their
    permissions. Include it in nats-server's configuration, and reload the
    server after each run of this command. The folder holds secrets: keys.json
    can create any credentials, so keep it off your servers; worker-keys.json,
    for a fleet controller, can create the credentials of pools' workers.

    NAME is the name of a file without ".creds": gateway, ledger, fleet, admin,
    pool-<pool>, or pool-<pool>.<machine>.
    """
    resolved = resolve_config(config, data)
    pools = _pools(resolved)
    parts = [*PARTS, *map(of_pool, pools)]
    renewed = parts if rotate == ["all"] else rotate or []
    if unknown := set(renewed) - set(parts):
        raise fail(f"{', '.join(unknown)}: cannot be rotated. Choose from: {', '.join(parts)}")
    try:
        authority = Authority.open(folder or resolved.data_dir / FOLDER_NAME)
        known = {user.file for user in authority.users if user.revoked_unix_s is None}
        missing = dict.fromkeys([*(part for part in parts if part not in known), *renewed])
        for part in missing:
            out.print(f"created {authority.issue(part)}", markup=False, soft_wrap=True)
        if not missing:
            out.print("no credentials were missing")
        for name in parts if retire == ["all"] else retire or []:
            out.print(f"{name}: revoked {authority.revoke(name, keep_newest=True)}", markup=False)
        for name in revoke or []:
            out.print(f"{name}: revoked {authority.revoke(name, keep_newest=False)}", markup=False)
        path = authority.write_server_config(pools)
        authority.write_worker_keys(name for name, pool in resolved.pools.items() if pool.fleet is not None)
    except AuthorityError as error:
        raise fail(str(error)) from error
    out.print(f"wrote {path}: reload nats-server", markup=False, soft_wrap=True)
    out.print(f"nats-server keeps the streams in jetstream/{authority.account_id()}", markup=False, soft_wrap=True)


def machine(
    pool: Annotated[str, typer.Argument(help="The pool that the machine's workers belong to.")],
    name: Annotated[str, typer.Argument(help="A name for the machine.")],
    hours: Annotated[float, typer.Option("--hours", min=0.01, help="Hours until the credentials expire.")] = 24.0,
    folder: FolderOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create credentials that expire, for the workers of one machine. Servers need no reload."""
    resolved = resolve_config(config, data)
    if pool not in resolved.pools:
        raise fail(f"pools.{pool}: no such pool")
    try:
        authority = Authority.open(folder or resolved.data_dir / FOLDER_NAME)
        path = authority.issue(of_pool(pool), check_name(name), lasts_s=hours * HOUR_S)
    except AuthorityError as error:
        raise fail(str(error)) from error
    out.print(str(path), markup=False, soft_wrap=True)


def _pools(config: Config) -> dict[str, Pool]:
    return {
        name: Pool(models=pool.models, lanes=pool.lanes(name), trusted=pool.trusted)
        for name, pool in config.pools.items()
    }
