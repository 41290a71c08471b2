"""The description of the REST API: an OpenAPI 3.1 document and a self-contained HTML page.

Pure; generated from the lists of endpoints and actions, so it matches the routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

import msgspec

import rt
from sequencer.rest.base.errors import Error
from sequencer.rest.base.fields import Schema, body_schema
from sequencer.rest.base.request import JSON

if TYPE_CHECKING:
    from sequencer.rest.views.context import Action
    from sequencer.rest.views.endpoints import RestEndpoint

_REFERENCE: Final = "#/components/schemas/{name}"
_ERROR: Final = {"$ref": _REFERENCE.format(name="Error")}
_ERRORS: Final = {
    "400": "A parameter or the body is unknown or malformed.",
    "403": "The certificate's stream or role has no access.",
    "405": "The path supports other methods only.",
    "503": "Too many concurrent requests, or the node has not joined its cluster yet.",
}
_ACTION_ERRORS: Final = {
    **_ERRORS,
    "409": "The action conflicts with the state of the cluster or the node's settings. Nothing was changed.",
    "413": "The body is too long.",
    "415": "The Content-Type is not application/json.",
    "503": "Too many concurrent requests, the node has not joined its cluster yet, or a reset cannot start.",
    "504": "The action did not complete in time. It may still take effect.",
}


def document(endpoints: Sequence[RestEndpoint], actions: Sequence[Action]) -> dict[str, Any]:
    kinds = [Error, *(one.answer for one in endpoints), *(one.answer for one in actions)]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {one.path: {"get": _reading(one)} for one in endpoints}
    for action in actions:
        paths.setdefault(action.path, {})["post"] = _changing(action)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rt node",
            "version": rt.__version__,
            "description": "State of a stream's cluster, and the actions of operators.",
        },
        "servers": [{"url": "/"}],
        "security": [{"certificate": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "certificate": {
                    "type": "mutualTLS",
                    "description": "A certificate of the stream that names a role.",
                }
            },
        },
    }


def _schema(kind: Any) -> Schema:
    """The schema of a response. Records are references to the components."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return schema


def _reading(endpoint: RestEndpoint) -> dict[str, Any]:
    schema = _schema(endpoint.answer)
    good = {"description": endpoint.summary, "content": _content(endpoint.content_type, schema)}
    answers = _answers(_ERRORS)
    if endpoint.may_be_503:
        answers["503"] = {
            "description": "The condition is false (the body says why), or too many concurrent requests.",
            "content": _content(endpoint.content_type, {"anyOf": [schema, _ERROR]}),
        }
    operation: dict[str, Any] = {
        "operationId": f"get-{endpoint.path.strip('/')}",
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


def _changing(action: Action) -> dict[str, Any]:
    good = {"description": action.summary, "content": _content(JSON, _schema(action.answer))}
    return {
        "operationId": f"post-{action.path.strip('/')}",
        "summary": action.summary,
        "description": f"For role {_roles(action)}.",
        "requestBody": {"required": True, "content": _content(JSON, body_schema(action.fields))},
        "responses": {str(action.status): good, **_answers(_ACTION_ERRORS)},
    }


def _answers(errors: dict[str, str]) -> dict[str, Any]:
    return {code: {"description": text, "content": _content(JSON, _ERROR)} for code, text in errors.items()}


def _content(content_type: str, schema: Schema) -> dict[str, Any]:
    return {content_type.partition(";")[0]: {"schema": schema}}


def _roles(one: RestEndpoint | Action) -> str:
    roles = ", ".join(sorted(one.roles))
    return f"{roles}; on the health port without a certificate" if getattr(one, "is_public", False) else roles


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


def docs_page(endpoints: Sequence[RestEndpoint], actions: Sequence[Action]) -> str:
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>rt node</title><style>{_STYLE}</style>',
        f"<h1>rt node {escape(rt.__version__)}</h1>",
        "<p>The HTTPS API of a node, for clients with a certificate of its stream. ",
        '<a href="openapi.json">OpenAPI</a>.</p>',
    ]
    for endpoint in endpoints:
        rows = [(f"?{one.name}=", one.description) for one in endpoint.parameters]
        parts += _section("GET", endpoint, "Parameters", rows)
    for action in actions:
        rows = [
            (one.name, f"{one.description}{' Required.' if one.is_required else ''}") for one in action.fields
        ]
        parts += _section("POST", action, "Body: a JSON object", rows)
    parts.append("</html>")
    return "\n".join(parts)


def _section(
    method: str, one: RestEndpoint | Action, title: str, rows: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """The section of one path; `rows` are its parameters or body fields."""
    yield f"<h2>{method} {escape(one.path)}</h2><p>{escape(one.summary)}<br>"
    yield f"For role {escape(_roles(one))}.</p>"
    if rows:
        yield from (f"<p>{title}</p>", _table(rows))
    schema = msgspec.json.schema(one.answer)
    if answer := list(_fields(schema, schema.get("$defs", {}))):
        yield from ("<p>Response</p>", _table(answer))


def _fields(schema: Schema, records: Mapping[str, Schema], path: str = "") -> Iterator[tuple[str, str]]:
    """Path and description of each field of a response. `records`: the records that the schema refers to, by
    name.
    """
    if "$ref" in schema:
        schema = records[schema["$ref"].rpartition("/")[2]]
    for one in schema.get("anyOf", ()):
        yield from _fields(one, records, path)
    if "items" in schema:
        yield from _fields(schema["items"], records, f"{path}[]")
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, field["description"]
        yield from _fields(field, records, here)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{escape(left)}</td><td>{escape(right)}</td></tr>" for left, right in rows)
    return f"<table>{''.join(cells)}</table>"
