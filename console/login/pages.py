"""Rendering pages: Jinja templates with every value escaped, and security headers."""

from pathlib import Path
from typing import Final

import jinja2
from starlette.responses import HTMLResponse

TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

PAGE_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


def page(template: str, status: int = 200, **values: object) -> HTMLResponse:
    """Render a template of ``console/login/templates``."""
    return HTMLResponse(TEMPLATES.get_template(template).render(values), status, PAGE_HEADERS)
