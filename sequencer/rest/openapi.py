"""The description of REST: OpenAPI 3.1 for programs, and a page for people that needs nothing from elsewhere.

Pure; made of the list of endpoints, so that it cannot differ from what is answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any, Final

import rt
from sequencer.rest import schemas
from sequencer.rest.schemas import Schema

if TYPE_CHECKING:
    from sequencer.rest.endpoints import Endpoint

_ERROR: Final = {"$ref": "#/components/schemas/Error"}
_ERRORS: Final = {
    "400": "A parameter that cannot be read, or is not known.",
    "403": "The certificate's stream or role may not have this.",
    "405": "Another method than GET or HEAD.",
    "503": "Too much is asked at once, or the node has not joined its cluster yet.",
}


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rt node",
            "version": rt.__version__,
            "description": "Reads the state of a stream's cluster. Nothing here changes anything.",
        },
        "servers": [{"url": "/"}],
        "security": [{"certificate": []}],
        "paths": {endpoint.path: {"get": _operation(endpoint)} for endpoint in endpoints},
        "components": {
            "schemas": {"Error": schemas.ERROR},
            "securitySchemes": {
                "certificate": {
                    "type": "mutualTLS",
                    "description": "A certificate of the stream, which names a role.",
                }
            },
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    good = {"description": endpoint.summary, "content": _content(endpoint.content_type, endpoint.schema)}
    answers: dict[str, Any] = {
        code: {"description": text, "content": _content("application/json", _ERROR)}
        for code, text in _ERRORS.items()
    }
    if endpoint.may_be_503:
        answers["503"] = {**good, "description": "It is not so; the body says why."}
    operation: dict[str, Any] = {
        "operationId": endpoint.path.strip("/"),
        "summary": endpoint.summary,
        "description": f"For role {_roles(endpoint)}.",
        "responses": {"200": good, **answers},
    }
    if endpoint.parameters:
        operation["parameters"] = [
            {
                "name": parameter.name,
                "in": "query",
                "description": parameter.description,
                "schema": parameter.schema,
            }
            for parameter in endpoint.parameters
        ]
    if endpoint.is_public:
        operation["security"] = [{"certificate": []}, {}]
    return operation


def _content(content_type: str, schema: Schema) -> dict[str, Any]:
    return {content_type.partition(";")[0]: {"schema": schema}}


def _roles(endpoint: Endpoint) -> str:
    told = ", ".join(sorted(endpoint.roles))
    return f"{told}; on the health port for everybody" if endpoint.is_public else told


# The page

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "h2{margin-top:2.5rem;font-family:ui-monospace,monospace;font-size:1.1rem}"
    "table{border-collapse:collapse;width:100%}"
    "td{border-top:1px solid #ddd;padding:.2rem .6rem .2rem 0;vertical-align:top}"
    "td:first-child,code{font-family:ui-monospace,monospace;white-space:nowrap}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#111}td{border-color:#333}"
    "a{color:#8bf}}"
)


def docs_page(endpoints: Iterable[Endpoint]) -> str:
    """The page."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>rt node</title><style>{_STYLE}</style>',
        f"<h1>rt node {escape(rt.__version__)}</h1>",
        "<p>What a node answers over HTTPS, to certificates of its stream. ",
        '<a href="openapi.json">OpenAPI</a>.</p>',
    ]
    for endpoint in endpoints:
        parts += [
            f"<h2>GET {escape(endpoint.path)}</h2><p>{escape(endpoint.summary)}<br>",
            f"For role {escape(_roles(endpoint))}.</p>",
        ]
        if endpoint.parameters:
            rows = [(f"?{one.name}=", one.description) for one in endpoint.parameters]
            parts += ["<p>Parameters</p>", _table(rows)]
        if rows := list(_fields(endpoint.schema)):
            parts += ["<p>Answer</p>", _table(rows)]
    parts.append("</html>")
    return "\n".join(parts)


def _fields(schema: Schema, path: str = "") -> Iterable[tuple[str, str]]:
    """Each field of an answer with its path and what it says."""
    if "items" in schema:
        yield from _fields(schema["items"], f"{path}[]")
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, field["description"]
        yield from _fields(field, here)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{escape(left)}</td><td>{escape(right)}</td></tr>" for left, right in rows)
    return f"<table>{''.join(cells)}</table>"
