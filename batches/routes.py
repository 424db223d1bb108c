"""The routes of files and batches."""

from collections.abc import Sequence

from fastapi import APIRouter

from batches.file_routes import file_router
from batches.services import BatchServices


def batch_routers(services: BatchServices) -> Sequence[APIRouter]:
    """Build all routers of this room."""
    return [file_router(services)]
