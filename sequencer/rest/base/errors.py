"""Errors of REST, and the HTTP form of every `RtError`. Pure.

Invariant: a response contains the parts of the error, truncated, and no other detail of the process.
"""

from __future__ import annotations

from typing import Annotated, Final

from rt.errors import RtError
from sequencer.rest.base.answer import Answer, doc
from sequencer.state.feature_level import FeatureLevelRefused

TEXT_MAX: Final = 400
"""Characters of each part of an error in a response, so that a long request is not echoed."""

_STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class NoSuchPath(RtError):
    """The path does not exist."""

    grpc_status = "NOT_FOUND"


class MethodNotAllowed(RtError):
    """The path exists, for other methods."""

    grpc_status = "UNIMPLEMENTED"


class BadRequest(RtError, ValueError):
    """A parameter or body that is unknown or malformed."""

    grpc_status = "INVALID_ARGUMENT"


class ResetRefused(RtError):
    """A reset cannot start: another one is running, or there is no majority."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class TooLarge(BadRequest):
    """A body above the size limit."""


class WrongMediaType(BadRequest):
    """Not application/json. Requiring it prevents cross-site requests from a browser."""


class Conflict(RtError):
    """The request conflicts with the cluster's state or settings. Nothing was changed."""

    grpc_status = "FAILED_PRECONDITION"


_BY_CLASS: Final = {
    MethodNotAllowed: 405,
    TooLarge: 413,
    WrongMediaType: 415,
    Conflict: 409,
    FeatureLevelRefused: 409,
}


def http_status(error: RtError) -> int:
    status = _BY_CLASS.get(type(error))
    return _STATUS.get(error.grpc_status, 500) if status is None else status


class Error(Answer):
    """An error."""

    error: Annotated[str, doc("Class of the error.")]
    what: Annotated[str, doc("The problem.")]
    where: Annotated[str | None, doc("Parameter, field, path or peer.")]
    got: Annotated[str | None, doc("The value that was received.")]
    expected: Annotated[str | None, doc("Valid values.")]
    hint: Annotated[str | None, doc("Next step.")]


def error_body(error: RtError) -> Error:
    def part(value: object) -> str | None:
        return None if value is None else str(value)[:TEXT_MAX]

    what, where, got = str(error.what)[:TEXT_MAX], part(error.where), part(error.got)
    return Error(type(error).__name__, what, where, got, part(error.expected), part(error.hint))
