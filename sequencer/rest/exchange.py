"""What is asked and what comes back, whichever way it came in. Pure."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote

from rt.errors import RtError
from sequencer.rest.body import BODY_BYTES_MAX
from sequencer.rest.errors import BadRequest, TooLarge, error_body, http_status

JSON: Final = "application/json"
PARAMETERS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked. `body` reads it, up to `BODY_BYTES_MAX` (`TooLarge` beyond); None: there is none."""

    method: str
    target: str
    """Path and query, percent-encoded: "/log-history?limit=2"."""
    content_type: str = ""
    body: Callable[[], Awaitable[bytes]] | None = None

    @classmethod
    def of(cls, method: str, target: str, body: bytes | None) -> Request:
        """One that is here whole; its body, if it has one, is meant as JSON."""

        async def read() -> bytes:
            if body is None or len(body) > BODY_BYTES_MAX:
                raise too_large()
            return body

        return cls(method, target) if body is None else cls(method, target, JSON, read)


@dataclass(frozen=True, slots=True)
class Reply:
    """What comes back."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    """Besides those that every answer has."""


def error_reply(error: RtError) -> Reply:
    """The reply that tells an error, which nobody counts."""
    status = http_status(error)
    headers = {}
    if status == 405:
        headers["Allow"] = str(error.wanted)
    if status == 503:
        headers["Retry-After"] = "1"
    return Reply(status, json_bytes(error_body(error)), JSON, headers)


def split_target(target: str) -> tuple[str, list[tuple[str, str]]]:
    """The path and the parameters of a request's target; `BadRequest` if there are far too many."""
    path, _, query = target.partition("#")[0].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMETERS_MAX)
    except ValueError:
        raise BadRequest("too many parameters", where="query", wanted=f"{PARAMETERS_MAX} at most") from None
    return unquote(path), pairs


def too_large() -> TooLarge:
    """The error for a body that is."""
    return TooLarge("the body is too long", where="body", wanted=f"{BODY_BYTES_MAX} bytes at most")


def json_bytes(body: object) -> bytes:
    """A value as JSON, in a line."""
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"
