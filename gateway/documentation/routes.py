"""The pages and their static files."""

import hashlib
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response
from starlette.responses import HTMLResponse

from gateway.api.errors import DOCUMENTATION_PATH
from gateway.documentation.error_catalog import error_page
from gateway.errors import UnknownUrl

_STATIC: Final = Path(__file__).with_name("static")
_FILES: Final = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "start.js": "text/javascript"}
_CONTENT: Final = {name: (_STATIC / name).read_bytes() for name in _FILES}
_VERSION: Final = hashlib.sha256(b"".join(_CONTENT.values())).hexdigest()[:12]
_PAGE: Final = (_STATIC / "page.html").read_text().replace("VERSION", _VERSION)
_HEADERS: Final = {
    "cache-control": "no-store",
    # Swagger UI styles elements one by one.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'"
    " data:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
_IMMUTABLE: Final = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}


def documentation_router() -> APIRouter:
    """Build the router. Its routes need no API key."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def documentation() -> Response:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    @router.get(DOCUMENTATION_PATH)
    async def errors() -> Response:
        return HTMLResponse(error_page(), headers=_HEADERS)

    @router.get("/docs/static/{version}/{name}")
    async def static(version: str, name: str) -> Response:
        if name not in _FILES:
            raise UnknownUrl(f"The documentation has no file {name!r}.")
        # Cache permanently only if the version matches: gateways of two releases may serve the same URL.
        return Response(_CONTENT[name], 200, _IMMUTABLE if version == _VERSION else _HEADERS, _FILES[name])

    return router
