"""``spillway nats``: who may do what at the queue server."""

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
    typer.Option("--folder", help=f"Where keys and credentials are. Default: {FOLDER_NAME} in the data folder."),
]


def credentials(
    folder: FolderOption = None,
    rotate: Annotated[
        list[str] | None,
        typer.Option(
            "--rotate", metavar="NAME", help="Make new credentials; the earlier ones stay valid. Repeatable; or 'all'."
        ),
    ] = None,
    retire: Annotated[
        list[str] | None,
        typer.Option("--retire", metavar="NAME", help="Revoke all but the newest. Repeatable; or 'all'."),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option("--revoke", metavar="NAME", help="Revoke all of this name: of a lost machine, say. Repeatable."),
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make what is missing of the credentials for each part and each pool of the configuration.

    Also writes nats-accounts.conf, the accounts with their permissions, for the
    configuration of nats-server: include it there, and reload the server
    whenever this command says that it has changed. The folder holds secrets:
    keys.json, which can make any credentials, should be on no server;
    worker-keys.json, for a fleet controller, can make those of pools' workers.

    NAME is that of a file without ".creds": gateway, ledger, fleet, admin,
    pool-<pool>, or pool-<pool>.<machine>.
    """
    resolved = resolve_config(config, data)
    pools = _pools(resolved)
    parts = [*PARTS, *map(of_pool, pools)]
    renewed = parts if rotate == ["all"] else rotate or []
    if strange := set(renewed) - set(parts):
        raise fail(f"{', '.join(strange)}: only those of parts and pools can be rotated: {', '.join(parts)}")
    try:
        authority = Authority.open(folder or resolved.data_dir / FOLDER_NAME)
        known = {user.file for user in authority.users if user.revoked_unix_s is None}
        missing = dict.fromkeys([*(part for part in parts if part not in known), *renewed])
        for part in missing:
            out.print(f"made {authority.issue(part)}", markup=False, soft_wrap=True)
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
    out.print(f"the streams are in the folder jetstream/{authority.account_id()}", markup=False, soft_wrap=True)


def machine(
    pool: Annotated[str, typer.Argument(help="The pool that the machine's workers belong to.")],
    name: Annotated[str, typer.Argument(help="A name for the machine.")],
    hours: Annotated[float, typer.Option("--hours", min=0.01, help="How long they are valid.")] = 24.0,
    folder: FolderOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make credentials for the workers of one machine, which expire by themselves. No server needs to be told."""
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
