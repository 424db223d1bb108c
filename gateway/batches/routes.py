"""The routes of files and batches."""

from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter

from gateway.api.fields import Body
from gateway.batches.batch_routes import NewBatch, batch_router
from gateway.batches.file_routes import file_router
from gateway.batches.message_routes import message_batch_router
from gateway.batches.services import BatchServices

BATCH_BODIES: Final[Sequence[type[Body]]] = (NewBatch,)


def batch_routers(services: BatchServices) -> Sequence[APIRouter]:
    """Build all routers of this room."""
    return [file_router(services), batch_router(services), message_batch_router(services)]
