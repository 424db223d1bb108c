"""Rendering pages: Jinja templates with every value escaped, versioned static files, and security headers."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from console.dashboard import formats
from console.dashboard.view import RANGES, REFRESH_S, View
from console.login.sessions import Session
from console.rules import ROUTES
from db.accounts.roles import Person
from db.money import usd_text
from ledger.queries.traffic import OTHER
from ledger.queries.window import DIMENSIONS
from ledger.tags import OTHER as OTHER_TAG
from protocol.distribution import version

_HERE: Final = Path(__file__).parent
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
IMMUTABLE_HEADERS: Final = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}

PAGES: Final = (  # the navigation: path, name
    ("", "Overview"),
    ("/alerts", "Alerts"),
    ("/tokens", "Tokens"),
    ("/latency", "Latency"),
    ("/cost", "Cost"),
    ("/models", "Models"),
    ("/pools", "Pools"),
    ("/fleet", "Fleet"),
    ("/requests", "Requests"),
    ("/refusals", "Refused"),
    ("/batches", "Batches"),
    ("/set-aside", "Set aside"),
    ("/keys", "Keys"),
    ("/webhooks", "Webhooks"),
    ("/audit", "Audit"),
    ("/playground", "Playground"),
    ("/exports", "Exports"),
)
RANGE_NAMES: Final = {
    "15m": "15 minutes",
    "1h": "1 hour",
    "6h": "6 hours",
    "24h": "24 hours",
    "7d": "7 days",
    "30d": "30 days",
    "90d": "90 days",
}
FILTERS: Final = ("model", "pool", "provider", "team", "key", "outcome")


def _read_static() -> dict[str, tuple[bytes, str]]:
    files = (path for path in (_HERE / "static").iterdir() if path.suffix in _TYPES)
    return {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in files}


_STATIC: Final = _read_static()
_VERSION: Final = hashlib.sha256(b"".join(content for _, (content, _) in sorted(_STATIC.items()))).hexdigest()[:12]


def static_file(version: str, name: str) -> Response | None:
    """Return a static file; None: unknown name. Only its current version may be cached permanently."""
    if name not in _STATIC:
        return None
    content, media_type = _STATIC[name]
    return Response(content, 200, IMMUTABLE_HEADERS if version == _VERSION else HEADERS, media_type)


def _data_block(value: object) -> Markup:
    """Encode JSON for ``<script type="application/json">`` so that it cannot end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704  # no markup is left in it


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = {
        name: getattr(formats, name) for name in ("count", "compact", "duration", "money", "charged", "share", "moment")
    }
    environment.filters |= {**written, "usd_text": usd_text, "data_block": _data_block}
    environment.globals |= {
        "VERSION": version(),
        "NOTHING": formats.NOTHING,
        "PAGES": PAGES,
        "RANGES": {name: RANGE_NAMES[name] for name in RANGES},
        "REFRESH_S": REFRESH_S,
        "FILTERS": FILTERS,
        "DIMENSIONS": DIMENSIONS,
        "static": f"/dashboard/static/{_VERSION}",
        "alerts": (),  # this and the next: defaults, for pages that show none
        "grafana_url": None,
        "OTHER": OTHER,
        "OTHER_TAG": OTHER_TAG,
    }
    return environment


TEMPLATES: Final = _environment()


def render(template: str, view: View, session: Session | None, values: Mapping[str, Any]) -> str:
    """Render a template of ``templates/`` to HTML; without a session, with links to all pages."""
    who = Person("", "viewer") if session is None else session.person
    shown = tuple(
        (path, name) for path, name in PAGES if session is None or who.may(ROUTES["GET", f"/dashboard{path}"])
    )
    return TEMPLATES.get_template(template).render(
        values, view=view, session=session, may=who.may, pages=shown, limited=who.team_ids is not None
    )


def html(text: str, status: int = 200) -> Response:
    """Build the response of a page."""
    return HTMLResponse(text, status, HEADERS)
