"""The answers of the supervisor on the health port while the data process does not answer. Pure.

The data process answers in the same form: see `sequencer.rest.views.cluster_views`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from sequencer.node.heartbeats import ChildState

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"


def health_answer(
    request: bytes, node: str, obstacles: Sequence[str], data: ChildState, control: ChildState
) -> bytes:
    """The HTTP response to `request`, which is the line and the headers of a request.

    Both probes fail. The metrics are the ones that alert rules need to name the hung process.
    """
    words = request.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _response(HTTPStatus.BAD_REQUEST, _JSON, _error("BadRequest", "malformed HTTP request"))
    method, target, _ = words
    if method not in {"GET", "HEAD"}:
        error = _error("MethodNotAllowed", "the method is not allowed here")
        response = _response(HTTPStatus.METHOD_NOT_ALLOWED, _JSON, error)
    elif (path := target.partition("?")[0]) in {"/readiness", "/liveness"}:
        name = "ready" if path == "/readiness" else "alive"
        content = json.dumps({name: False, "obstacles": list(obstacles)})
        response = _response(HTTPStatus.SERVICE_UNAVAILABLE, _JSON, content)
    elif path == "/metrics":
        response = _response(HTTPStatus.OK, _TEXT, _metrics(node, data, control))
    else:
        response = _response(HTTPStatus.NOT_FOUND, _JSON, _error("NotFound", "there is no such path"))
    return response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == "HEAD" else response


def _metrics(node: str, data: ChildState, control: ChildState) -> str:
    lines = (
        "rt_is_ready 0",
        f'rt_member_data_silent_seconds{{member="{node}"}} {data.silent_s:.3f}',
        f"rt_control_connected {int(control.has_sent_heartbeat)}",
        f"rt_control_silent_seconds {control.silent_s:.3f}",
    )
    return "".join(f"# TYPE {line.split('{')[0].split(' ')[0]} gauge\n{line}\n" for line in lines)


def _error(name: str, message: str) -> str:
    return json.dumps({"error": name, "message": f"{message}. The data process does not answer."})


def _response(status: HTTPStatus, content_type: str, content: str) -> bytes:
    body = content.encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nServer: rt\r\nCache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
