"""Composition of files and batches."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.keyring import KeyRing
from db.set_aside import SetAside
from gateway.api.fields import Body
from gateway.batches.anthropic_routes import message_batch_router
from gateway.batches.asking import Asking
from gateway.batches.feeder import Feeder, Finished
from gateway.batches.files import Files, UploadSlots
from gateway.batches.openai_routes import NewBatch, batch_router, file_router
from gateway.batches.parts import BatchServices, Counted, Threads
from gateway.batches.room import Admission, OpenLines
from gateway.batches.run import FeederDeps
from gateway.batches.series import BatchSeries
from gateway.batches.storage.registry import open_storage
from gateway.batches.store import Batches
from gateway.settings import BatchSettings
from protocol.nats.bus import Bus

INDEXES: Final = "batches"  # subfolder of the data folder


def open_batches(
    settings: BatchSettings,
    data_dir: Path,
    database: AsyncEngine,
    keys: KeyRing,
    *,
    endpoints: frozenset[str],
    counted: Counted,
    threads: Threads,
) -> BatchServices:
    """Return the dependencies of the routes. ``endpoints``: allowed endpoints of batches."""
    files = Files(database, open_storage(settings, data_dir))
    return BatchServices(
        settings=settings,
        folder=data_dir / INDEXES,
        keys=keys,
        files=files,
        batches=Batches(database),
        endpoints=endpoints,
        changed=asyncio.Event(),
        uploads=UploadSlots(settings.max_uploads),
        counted=counted,
        threads=threads,
    )


def make_feeder(
    services: BatchServices,
    bus: Bus,
    asking: Asking,
    admission: Admission,
    *,
    series: BatchSeries,
    set_aside: SetAside,
    models: Mapping[str, str],
    gateway_id: str,
    finished: Finished,
) -> Feeder:
    """Return the feeder. ``models``: the configured model of each name and alias."""
    deps = FeederDeps(
        settings=services.settings,
        keys=services.keys,
        files=services.files,
        batches=services.batches,
        asking=asking,
        models=models,
        room=OpenLines(admission, services.settings),
        series=series,
        set_aside=set_aside,
        folder=services.folder,
    )
    return Feeder(deps, bus, gateway_id, services.changed, finished=finished)


# --- routes -----------------------------------------------------------------------------------------------------------
#
# The routes of files and batches.

BATCH_BODIES: Final[Sequence[type[Body]]] = (NewBatch,)


def batch_routers(services: BatchServices) -> Sequence[APIRouter]:
    """Build all routers of files and batches."""
    return [file_router(services), batch_router(services), message_batch_router(services)]
