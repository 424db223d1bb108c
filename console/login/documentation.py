"""GET /docs: the OpenAPI description as a page, without scripts and without third-party servers."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from console.login.pages import page


def add_documentation(app: FastAPI) -> None:
    """Register the page that shows ``app.openapi``."""

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        document = app.openapi()
        return page("documentation.html", document=document, type_of=type_of, schema_name=schema_name)


def schema_name(schema: dict[str, Any]) -> str | None:
    """Return the component that a schema refers to; None: it is inline."""
    reference = schema.get("$ref")
    return None if reference is None else str(reference).rsplit("/", 1)[-1]


def type_of(schema: dict[str, Any]) -> str:
    """Describe a schema briefly, such as "string | null" or "Message[]"."""
    name = schema_name(schema)
    if name is not None:
        return name
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " | ".join(dict.fromkeys(type_of(choice) for choice in choices))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(f'"{value}"' for value in values)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"{type_of(schema.get('items', {}))}[]"
    return " | ".join(kind) if isinstance(kind, list) else str(kind)
