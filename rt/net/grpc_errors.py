"""Errors of rt as gRPC statuses, and back.

    RtError ──encode_error──► trailing metadata `rt-error-bin` ──decode_error──► RtError
        └── its class's grpc_status, its text as the details

The item is a JSON object of texts {class, what, where, got, expected, hint}, and the positions {start, end}
of an `rt.errors.CorruptRange`, at most 4 KiB.

Invariants:
- An item from a peer creates only classes of `rt.errors`. Its text cannot control a terminal or forge a log
  line.
- A peer never sees a stack trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import rt.errors
import rt.v1  # sets the ciphers, before gRPC loads
from rt.errors import (
    CertificateError,
    CorruptRange,
    FormatError,
    MessageTooLarge,
    Overloaded,
    RtError,
    Timeout,
)
from rt.log.format.constants import NUMBER_MAX

# isort: split
import grpc
import grpc.aio

ERROR_KEY = "rt-error-bin"
ERROR_BYTES_MAX = 4096
"""Even in base64, this leaves two thirds of the 16 KiB of metadata that gRPC accepts."""

_TEXT_MAX = 800  # characters of one text; five such texts fit if they are plain
_DETAILS_MAX = 500  # gRPC encodes each byte that is not ASCII as three characters
_TEXTS = ("what", "where", "got", "expected", "hint")

_NOT_CONNECTED = re.compile(r"^failed to connect to all addresses; last error: \w+: (?=\S)")
"""The text with which gRPC starts its report of every failed connection, before the address and the
reason.
"""

logger = logging.getLogger("rt.net")


class Unreachable(RtError):
    """There was no connection to the peer, or it was lost. The operation may have happened."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class NothingMergedYet(Unreachable):
    """The peer's log has no message yet."""


class MembersChanged(Unreachable):
    """The node ended the stream because the members changed. The client may connect again at once, and the
    node then names the members.
    """

    def __init__(self, what: str = "the members of the cluster changed", **details: Any) -> None:
        super().__init__(what, **{"hint": "Connect again: the node names them.", **details})


_BY_CODE: dict[grpc.StatusCode, type[RtError]] = {
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.DATA_LOSS: FormatError,
    grpc.StatusCode.DEADLINE_EXCEEDED: Timeout,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAUTHENTICATED: CertificateError,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
}
"""The meaning of a status without our item: it came from gRPC itself, or from a proxy."""


def status_of(error: RtError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_status]


def encode_error(error: RtError) -> bytes:
    """The metadata item for the error. Cuts long texts."""
    texts = {name: getattr(error, name) for name in _TEXTS}
    limit = _TEXT_MAX
    while True:
        fields = {name: _clean(str(text), limit) for name, text in texts.items() if text is not None}
        places = {"start": error.start, "end": error.end} if isinstance(error, CorruptRange) else {}
        item = json.dumps({"class": type(error).__name__, **fields, **places}).encode()
        if len(item) <= ERROR_BYTES_MAX:
            return item
        limit //= 2


def decode_error(item: bytes) -> RtError | None:
    """The error in an item; None if it holds none.

    An unknown class becomes `rt.RtError`. A class with more fields than are sent (`rt.Gap`: event;
    `rt.Corrupt`: path) becomes its nearest base class without them.
    """
    if len(item) > ERROR_BYTES_MAX:
        return None
    try:
        fields = json.loads(item)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("what"), str):
        return None
    texts = {name: _clean(fields[name], _TEXT_MAX) for name in _TEXTS if isinstance(fields.get(name), str)}
    kind = _class_named(fields.get("class"))
    if issubclass(kind, CorruptRange):
        start, end = fields.get("start"), fields.get("end")
        if type(start) is int and type(end) is int and 0 <= start <= end <= NUMBER_MAX:
            return kind(**texts, start=start, end=end)
    return _make(kind, **texts)


def error_of(call: grpc.aio.AioRpcError, *, where: object = None) -> RtError:
    """The error that ended a call: the peer's, or else the meaning of its status.

    `where` names the peer; it is used if the error has none of its own.
    """
    for key, value in call.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, bytes) and (error := decode_error(value)):
            if error.where is None:
                error.where = where
            return error
    code = call.code()
    details = _clean(call.details() or "no reason given", _DETAILS_MAX)
    kind = _BY_CODE.get(code, RtError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        kind = MessageTooLarge  # the same message would be too large again
    elif code is grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in details:
        kind = CertificateError  # the peer's certificate does not chain to our CA
    elif code is grpc.StatusCode.INTERNAL and "Internal error from Core" in details:
        kind = Unreachable  # the text of grpc.aio for a write after the end of the call
    hint = _hint_for(details)
    return kind(f"the call ended with {code.name}: {_NOT_CONNECTED.sub('', details)}", where=where, hint=hint)


def _hint_for(details: str) -> str | None:
    """A hint for errors of gRPC itself."""
    if "not match" in details:
        return "Is that a node's own name, and its certificate's?"
    # A gRPC server closes the connection without an alert.
    is_closed = "Socket closed" in details or "Connection reset" in details
    if "failed to connect" in details and is_closed:
        return (
            "The node ends the connection when it has seen our certificate: does it chain to the node's CA, "
            "and is it valid now? See `rt certs show`, and the node's clock."
        )
    return None


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RtError) -> NoReturn:
    try:
        await context.abort(
            status_of(error), _clean(str(error), _DETAILS_MAX), ((ERROR_KEY, encode_error(error)),)
        )
    except grpc.aio.InternalError as ended:
        raise asyncio.CancelledError from ended  # the peer has ended the call
    raise AssertionError  # abort raises; its stubs do not all say so


@contextlib.asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any], method: str = "") -> AsyncIterator[None]:
    """End the call with the block's exception: an `RtError` as it is, any other as INTERNAL.

    Any other is logged here, and not sent. Cancellation and the block's own abort pass through.
    """
    try:
        yield
    except RtError as error:
        await abort(context, error)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error  # the call had ended when a reply was written
    except grpc.aio.BaseError:
        raise
    except Exception:
        logger.exception("call_failed method=%s peer=%s", method, context.peer())
        await abort(context, RtError("the server failed", hint="See its log for the reason."))


@contextlib.contextmanager
def asking(where: object) -> Iterator[None]:
    """If a call in the block ends with an error, raise it as an rt error, with `where` as the peer.

    A write to a call that has already ended raises `Unreachable`; only a read returns the reason.
    """
    try:
        yield
    except grpc.aio.AioRpcError as call:
        raise error_of(call, where=where) from call
    except asyncio.InvalidStateError as error:
        if "RPC already finished" not in str(error):  # an error of some future, not of grpc.aio
            raise
        raise Unreachable("the call had ended", where=where) from error


def _class_named(name: object) -> type[RtError]:
    for own in (Unreachable, NothingMergedYet, MembersChanged):
        if name == own.__name__:
            return own
    kind = getattr(rt.errors, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, RtError) else RtError


def _make(kind: type[RtError], what: str, **details: Any) -> RtError:
    for above in kind.__mro__:
        with contextlib.suppress(TypeError):  # it needs more arguments
            made: RtError = above(what, **details)
            return made
    raise AssertionError(kind)


def _clean(text: str, limit: int) -> str:
    """At most `limit` characters of the text, with unprintable ones escaped."""
    text = text[:limit]
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    return text[:limit]
