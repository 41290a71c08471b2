"""Errors of rt over gRPC: their status, the encoded fields, and hostile items from a peer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rt
import rt.errors
from rt.errors import CorruptRange, RtError
from rt.events import SkipForward
from rt.net.grpc_errors import (
    ERROR_BYTES_MAX,
    ERROR_KEY,
    Unreachable,
    answering,
    decode_error,
    encode_error,
    error_of,
    status_of,
)

PLAIN = [
    kind
    for kind in vars(rt.errors).values()
    if isinstance(kind, type) and issubclass(kind, RtError) and kind not in {rt.Gap, rt.Corrupt}
] + [Unreachable]
TEXTS = st.text(max_size=80) | st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=600)
VALUES = st.none() | TEXTS | st.integers() | st.lists(st.integers(), max_size=3)
FIELDS = ("what", "where", "got", "expected", "hint")
ERRORS = st.builds(
    lambda kind, what, where, got, wanted, hint: kind(what, where=where, got=got, expected=wanted, hint=hint),
    st.sampled_from(PLAIN),
    TEXTS,
    VALUES,
    VALUES,
    VALUES,
    st.none() | TEXTS,
)


def ended(code: str, details: str = "", *items: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(*items), details=details
    )


class Context:
    """The part of a servicer's context that ends calls."""

    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]] | None = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, details: str, items: tuple[tuple[str, bytes], ...]) -> None:
        self.ended = code, details, items
        raise grpc.aio.AbortError


def spelled(text: str) -> str:
    """Escape every unprintable character as Python does in a string. This is the simplest definition."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# --- round trips ------------------------------------------------------------------------------------------


@given(ERRORS)
@example(RtError("\ud800", where="\x1b[2J\nforged line", got="\u202e"))
def test_error_round_trips_with_unprintable_characters_escaped(error: RtError) -> None:
    item = encode_error(error)
    assert len(item) <= ERROR_BYTES_MAX
    back = error_of(ended(error.grpc_status, "", (ERROR_KEY, item)))
    assert type(back) is type(error)
    assert back.retriable == error.retriable
    for name in FIELDS:
        before, after = getattr(error, name), getattr(back, name)
        if before is None:
            assert after is None
        else:
            assert spelled(str(before)).startswith(after)
            assert len(after) >= min(len(spelled(str(before))), 50)


LONG = st.text(min_size=1, max_size=20).map(lambda text: text * 2000)


@given(st.sampled_from(PLAIN), LONG, LONG)
def test_error_of_any_length_fits_and_keeps_start_of_its_text(
    kind: type[RtError], what: str, got: str
) -> None:
    error = kind(what, where=got, got=got, expected=what, hint=got)
    item = encode_error(error)
    assert len(item) <= ERROR_BYTES_MAX
    back = decode_error(item)
    assert back is not None
    assert back.what
    assert spelled(what).startswith(back.what)


@pytest.mark.parametrize("kind", PLAIN)
def test_every_error_class_maps_to_its_own_status(kind: type[RtError]) -> None:
    assert status_of(kind("no")).name == kind.grpc_status


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (rt.Corrupt("bad", path="/secret/log.0.0", offset=8), rt.FormatError),
        (rt.Gap("gone", event=SkipForward(1, 5, "time")), RtError),
        (type("New", (RtError,), {})("of a newer rt"), RtError),
        (rt.DiskFull("full", accepted=range(3)), rt.DiskFull),
    ],
)
def test_error_with_unsendable_class_or_fields_decodes_to_nearest_class(
    error: RtError, kind: type[RtError]
) -> None:
    back = decode_error(encode_error(error))
    assert type(back) is kind
    assert back.what == error.what


# --- from a hostile peer ----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
NAMES = st.sampled_from(["RtError", "Gap", "Damaged", "annotations", "TYPE_CHECKING", "_restore", "Any", ""])
ITEMS = st.binary() | st.builds(
    lambda fields, name: json.dumps({**fields, "class": name}).encode(),
    st.dictionaries(st.sampled_from(FIELDS), JSON),
    NAMES | JSON,
)


@given(ITEMS)
@example(b"[" * 4096)
@example(b'{"what": "\\u001b[2J"}')
@example(b'{"class": "__class__", "what": "x"}')
@example(b'{"what": ' + b"9" * 4000 + b"}")
def test_arbitrary_item_decodes_to_printable_rt_error_or_none(item: bytes) -> None:
    error = decode_error(item)
    if error is not None:
        assert type(error) is Unreachable or getattr(rt.errors, type(error).__name__) is type(error)
        assert str(error).isprintable()


def test_oversized_item_decodes_to_none() -> None:
    item = encode_error(rt.Fenced("no"))
    assert decode_error(item) is not None
    assert decode_error(item + b" " * ERROR_BYTES_MAX) is None


# --- statuses without an item -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_every_status_without_item_becomes_printable_rt_error(code: grpc.StatusCode) -> None:
    error = error_of(ended(code.name, "some \x1b[2Jreason"), where="n1:5002")
    assert isinstance(error, RtError)
    assert error.where == "n1:5002"
    assert code.name in str(error)
    assert str(error).isprintable()


@pytest.mark.parametrize(
    ("code", "details", "kind", "retriable"),
    [
        ("UNAVAILABLE", "failed to connect", Unreachable, True),
        ("CANCELLED", "", Unreachable, True),
        ("DEADLINE_EXCEEDED", "", rt.Timeout, True),
        ("RESOURCE_EXHAUSTED", "", rt.Overloaded, True),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)", rt.MessageTooLarge, False),
        ("UNAUTHENTICATED", "", rt.CertificateError, False),
        ("DATA_LOSS", "", rt.FormatError, False),
        ("INTERNAL", "", RtError, False),
        ("INTERNAL", "Internal error from Core", Unreachable, True),
        ("UNKNOWN", "", RtError, False),
    ],
)
def test_status_without_item_maps_to_error_class_and_retriability(
    code: str, details: str, kind: type[RtError], retriable: bool
) -> None:
    error = error_of(ended(code, details))
    assert (type(error), error.retriable) == (kind, retriable)


def test_failed_connection_error_names_only_last_address_and_reason() -> None:
    told = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Socket closed"
    error = error_of(ended("UNAVAILABLE", told))
    assert error.what == "the call ended with UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"
    assert "does it chain to the node's CA" in str(error)


def test_undecodable_item_falls_back_to_status_code() -> None:
    assert type(error_of(ended("UNAVAILABLE", "x", (ERROR_KEY, b"?")))) is Unreachable


def test_error_keeps_peer_location_or_uses_peer_address_if_missing() -> None:
    told = error_of(
        ended("DATA_LOSS", "", (ERROR_KEY, encode_error(rt.Diverged("d", where="x")))), where="n1"
    )
    silent = error_of(ended("DATA_LOSS", "", (ERROR_KEY, encode_error(rt.Diverged("d")))), where="n1")
    assert (told.where, silent.where) == ("x", "n1")


# --- handlers ---------------------------------------------------------------------------------------------


def answer(raised: BaseException | None) -> Context:
    context = Context()

    async def handle() -> None:
        async with answering(context, "/test/Method"):  # type: ignore[arg-type]
            if raised:
                raise raised

    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(handle())
    return context


def test_rt_error_ends_call_with_its_status_text_and_item() -> None:
    error = rt.DiskFull("no space", where="/data", hint="Make some.")
    assert answer(error).ended == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        str(error),
        ((ERROR_KEY, encode_error(error)),),
    )


def test_other_exception_is_logged_locally_and_not_sent_to_peer(caplog: pytest.LogCaptureFixture) -> None:
    context = answer(KeyError("a secret"))
    assert context.ended is not None
    assert context.ended[0] is grpc.StatusCode.INTERNAL
    assert "secret" not in str(context.ended)
    assert "Traceback" not in str(context.ended)
    assert "call_failed method=/test/Method peer=ipv4:127.0.0.1:1" in caplog.text
    assert "a secret" in caplog.text


def test_abort_and_cancellation_pass_through_without_log(
    caplog: pytest.LogCaptureFixture, logged: Callable[[str], list[str]]
) -> None:
    context = Context()

    async def handle(raised: BaseException) -> None:
        async with answering(context):  # type: ignore[arg-type]
            raise raised

    with caplog.at_level(logging.INFO):
        for raised in (grpc.aio.AbortError(), asyncio.CancelledError()):
            with pytest.raises(type(raised)):
                asyncio.run(handle(raised))
    assert context.ended is None
    assert logged("rt.net") == []


def test_corrupt_range_positions_round_trip_and_invalid_ones_become_0() -> None:
    error = decode_error(encode_error(CorruptRange("damaged here", start=7, end=90, where="n1")))
    assert isinstance(error, CorruptRange)
    assert (error.start, error.end, error.where) == (7, 90, "n1")
    for start, end in ((-1, 5), (9, 8), (0, 2**70), (True, 5), ("0", 5), (0.0, 5)):
        item = json.dumps({"class": "CorruptRange", "what": "x", "start": start, "end": end}).encode()
        error = decode_error(item)
        assert isinstance(error, CorruptRange)
        assert (error.start, error.end) == (0, 0)
