"""Errors of REST, and how every error of the tree is told over HTTP.

Pure. Law: an answer tells what the error says, cut short, and nothing of the process behind it.
"""

from __future__ import annotations

from typing import Final

from rt.errors import RtError

TEXT_MAX: Final = 400
"""Characters of each part of an error that is told: what a caller sent is not sent back at length."""

_STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class NoSuchPath(RtError):
    """Nothing is answered at that path."""

    grpc_status = "NOT_FOUND"


class MethodNotAllowed(RtError):
    """The path is known, and does something else."""

    grpc_status = "UNIMPLEMENTED"


class BadRequest(RtError, ValueError):
    """A parameter, or a body, that the path does not take."""

    grpc_status = "INVALID_ARGUMENT"


class NotReady(RtError):
    """This node cannot answer now; it, or another one, can soon."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class TooLarge(BadRequest):
    """A body beyond the bound."""


class WrongMediaType(BadRequest):
    """A body that does not say that it is JSON: so no page of another site can have a browser send it."""


class Conflict(RtError):
    """What was asked for does not fit the state of the cluster, or its settings; nothing was changed."""

    grpc_status = "FAILED_PRECONDITION"


_BY_CLASS: Final = {MethodNotAllowed: 405, TooLarge: 413, WrongMediaType: 415, Conflict: 409}


def http_status(error: RtError) -> int:
    """The HTTP status that an error travels as."""
    status = _BY_CLASS.get(type(error))
    return _STATUS.get(error.grpc_status, 500) if status is None else status


def error_body(error: RtError) -> dict[str, str | None]:
    """The error as JSON tells it."""
    parts = {name: getattr(error, name) for name in ("what", "where", "got", "wanted", "hint")}
    told = {name: None if part is None else str(part)[:TEXT_MAX] for name, part in parts.items()}
    return {"error": type(error).__name__, **told}
