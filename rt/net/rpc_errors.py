"""Errors of rt as gRPC statuses, and back.

    RtError ──encode_error──► trailing metadata `rt-error-bin` ──decode_error──► RtError
        └── its class's grpc_status, its text as the details

The item is a JSON object of texts {class, what, where, got, wanted, hint}, 4 KiB at most. Laws: what a peer
sends makes no other class than one of `rt.errors`, and its text holds nothing that steers a terminal or
forges a line of a log. A peer never sees a stack trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import rt.errors
import rt.v1  # the ciphers, before gRPC loads
from rt.errors import CertificateError, FormatError, MessageTooLarge, Overloaded, RtError, Timeout

# isort: split
import grpc
import grpc.aio

ERROR_KEY = "rt-error-bin"
ERROR_BYTES_MAX = 4096
"""Leaves three quarters of the 16 KiB of metadata that gRPC takes, also in base64."""

_TEXT_MAX = 800  # characters of one text, if they are plain: five of them fit
_DETAILS_MAX = 500  # gRPC spells what is not ASCII with three characters a byte
_TEXTS = ("what", "where", "got", "wanted", "hint")

logger = logging.getLogger("rt.net")


class Unreachable(RtError):
    """No connection to the peer, or it was lost; what was asked for may have happened."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class NothingYet(Unreachable):
    """The peer's log has no message so far."""


_BY_CODE: dict[grpc.StatusCode, type[RtError]] = {
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.DATA_LOSS: FormatError,
    grpc.StatusCode.DEADLINE_EXCEEDED: Timeout,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAUTHENTICATED: CertificateError,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
}
"""What a status means that came without our item: from gRPC itself, or from what stands between."""


def status_of(error: RtError) -> grpc.StatusCode:
    """The status that the error travels as."""
    return grpc.StatusCode[error.grpc_status]


def encode_error(error: RtError) -> bytes:
    """The item for the error. Texts that are too long are cut."""
    texts = {name: getattr(error, name) for name in _TEXTS}
    limit = _TEXT_MAX
    while True:
        fields = {name: _clean(str(text), limit) for name, text in texts.items() if text is not None}
        item = json.dumps({"class": type(error).__name__, **fields}).encode()
        if len(item) <= ERROR_BYTES_MAX:
            return item
        limit //= 2


def decode_error(item: bytes) -> RtError | None:
    """The error in an item; None if it holds none.

    A class that is not known here becomes `rt.RtError`; one that carries more than travels (`rt.Gap`, its
    event; `rt.Damaged`, a path of the peer's) the nearest above it that does not.
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
    return _make(_class_named(fields.get("class")), **texts)


def error_of(call: grpc.aio.AioRpcError, *, where: object = None) -> RtError:
    """The error that ended a call: the peer's, or else what its status means. `where` names the peer.

    A `where` of the peer's own stays; `where` stands in for one it did not give.
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
        kind = MessageTooLarge  # would be so again
    elif code is grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in details:
        kind = CertificateError  # the peer's; it does not chain to our CA
    elif code is grpc.StatusCode.INTERNAL and "Internal error from Core" in details:
        kind = Unreachable  # what grpc.aio says for a write that met the end of the call
    return kind(f"the call ended with {code.name}: {details}", where=where, hint=_hint_for(details))


def _hint_for(details: str) -> str | None:
    """What helps where gRPC itself says no more."""
    if "not match" in details:
        return "Is that a node's own name, and its certificate's?"
    # Its server closes without an alert.
    is_closed = "Socket closed" in details or "Connection reset" in details
    if "failed to connect" in details and is_closed:
        return (
            "The node ends the connection when it has seen our certificate: does it chain to the node's CA, "
            "and is it valid now? See `rt certs show`, and the node's clock."
        )
    return None


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RtError) -> NoReturn:
    """End the call with the error."""
    await context.abort(
        status_of(error), _clean(str(error), _DETAILS_MAX), ((ERROR_KEY, encode_error(error)),)
    )
    raise AssertionError  # abort raises; its stubs do not all say so


@contextlib.asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any], method: str = "") -> AsyncIterator[None]:
    """End the call with whatever the block raises: an `RtError` as it is, anything else as INTERNAL.

    The latter is logged here and nothing of it told. Cancellation and an abort of the block's own pass
    through.
    """
    try:
        yield
    except RtError as error:
        await abort(context, error)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error  # a reply met the end of the call
    except grpc.aio.BaseError:
        raise
    except Exception:
        logger.exception("call_failed method=%s peer=%s", method, context.peer())
        await abort(context, RtError("the server failed", hint="Its log says why."))


@contextlib.contextmanager
def asking(where: object) -> Iterator[None]:
    """Raise what ends a call in the block as the error it is, `where` naming the peer.

    A write may meet a call that ended before: then it is `Unreachable`, and only a read would say why.
    """
    try:
        yield
    except grpc.aio.AioRpcError as call:
        raise error_of(call, where=where) from call
    except asyncio.InvalidStateError as error:
        if "RPC already finished" not in str(error):  # of some future, not of grpc.aio
            raise
        raise Unreachable("the call had ended", where=where) from error


def _class_named(name: object) -> type[RtError]:
    for own in (Unreachable, NothingYet):
        if name == own.__name__:
            return own
    kind = getattr(rt.errors, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, RtError) else RtError


def _make(kind: type[RtError], what: str, **details: Any) -> RtError:
    for above in kind.__mro__:
        with contextlib.suppress(TypeError):  # it wants more than these
            made: RtError = above(what, **details)
            return made
    raise AssertionError(kind)


def _clean(text: str, limit: int) -> str:
    """The text, `limit` characters of it at most, with all that does not print spelled out."""
    text = text[:limit]
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    return text[:limit]
