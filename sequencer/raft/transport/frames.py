"""The frames of Raft nodes: a header, then a body (`codec`). All integers are little-endian. Pure.

    header, 16 bytes                             epoch is the sender's cluster epoch
        offset  bytes  field
             0      4  bytes of the body
             4      1  kind
             5      1  version of the protocol
             6      2  0
             8      8  epoch

A hello is always a frame of version 1, and contains the versions that its sender knows. Every other frame has
the latest version that both sides know.

Invariant: a header that `decode_header` returns is within the limits of its kind.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from replicator.protocol.version import VersionRange
from rt.errors import FormatError, UnknownVersion
from sequencer.raft.model.messages import (
    APPEND_BYTES_MAX,
    CHUNK_BYTES_MAX,
    COMMAND_BYTES_MAX,
    DIGEST_BYTES,
    ENTRY_BYTES_MAX,
    ID_BYTES,
    MEMBER_LIST_BYTES_MAX,
)

Buffer: TypeAlias = bytes | memoryview

HELLO_VERSION: Final = 1
VERSIONS: Final = VersionRange(1, 1)
"""The versions of the protocol that this program knows."""
HELLO_REST_BYTES_MAX: Final = 64
"""A newer program may append more to its hello; it is ignored."""
APPEND_ENTRIES_MAX: Final = 1 << 17
"""Entries in one `AppendEntries`: as many as `APPEND_BYTES_MAX` holds at 16 bytes each."""
NUMBER_MAX: Final = (1 << 63) - 1
"""The largest index, term or offset: a signed 64-bit integer, here and in the files."""


class FrameKind(IntEnum):
    PING = 1
    HELLO = 2
    REQUEST_VOTE = 3
    REQUEST_VOTE_REPLY = 4
    APPEND_ENTRIES = 5
    APPEND_ENTRIES_REPLY = 6
    INSTALL_SNAPSHOT = 7
    INSTALL_SNAPSHOT_REPLY = 8
    FORWARD = 9
    ADMIT = 10
    APP_MESSAGE = 11
    TIMEOUT_NOW = 12
    FETCH_STATE = 13
    FETCH_STATE_CHUNK = 14
    MEMBER_LIST = 15


class Header(NamedTuple):
    """The header of a frame. The `length` of the body is within the limits of the kind."""

    length: int
    kind: int
    epoch: int


_HEADER: Final = struct.Struct("<IBBHQ")
_CLAIM: Final = f"{ID_BYTES}sQQ"
FIXED_LAYOUTS: Final = {
    FrameKind.PING: struct.Struct(""),
    FrameKind.HELLO: struct.Struct(f"<{ID_BYTES}sQ{_CLAIM}B"),
    FrameKind.REQUEST_VOTE: struct.Struct(f"<QQQ{_CLAIM}BB"),
    FrameKind.REQUEST_VOTE_REPLY: struct.Struct(f"<QB{_CLAIM}B"),
    FrameKind.APPEND_ENTRIES: struct.Struct("<QQQQQQBI"),
    FrameKind.APPEND_ENTRIES_REPLY: struct.Struct(f"<QBQQ{_CLAIM}"),
    FrameKind.INSTALL_SNAPSHOT: struct.Struct(f"<QQQQ{DIGEST_BYTES}sQ"),
    FrameKind.INSTALL_SNAPSHOT_REPLY: struct.Struct(f"<QQQQQB{_CLAIM}"),
    FrameKind.FORWARD: struct.Struct(""),
    FrameKind.ADMIT: struct.Struct(""),
    FrameKind.APP_MESSAGE: struct.Struct(""),
    FrameKind.TIMEOUT_NOW: struct.Struct("<Q"),
    FrameKind.FETCH_STATE: struct.Struct(f"<{DIGEST_BYTES}sQ"),
    FrameKind.FETCH_STATE_CHUNK: struct.Struct(f"<QQQ{DIGEST_BYTES}sQ"),
    FrameKind.MEMBER_LIST: struct.Struct("<QB"),
}
"""The fixed part of each kind's body."""
ENTRY_TABLE_BYTES: Final = 12
"""Bytes of an entry in addition to its content."""
REST_BYTES_MAX: Final = {
    FrameKind.HELLO: HELLO_REST_BYTES_MAX,
    FrameKind.APPEND_ENTRIES: APPEND_ENTRIES_MAX * ENTRY_TABLE_BYTES + APPEND_BYTES_MAX,
    FrameKind.INSTALL_SNAPSHOT: CHUNK_BYTES_MAX,
    FrameKind.FORWARD: ENTRY_BYTES_MAX,
    FrameKind.ADMIT: CHUNK_BYTES_MAX,
    FrameKind.APP_MESSAGE: COMMAND_BYTES_MAX,
    FrameKind.FETCH_STATE_CHUNK: CHUNK_BYTES_MAX,
    FrameKind.MEMBER_LIST: MEMBER_LIST_BYTES_MAX,
}
"""Limit for the bytes after the fixed part. Other kinds have none."""
FRAME_HEADER_BYTES: Final = _HEADER.size
FRAME_BYTES_MAX: Final = FRAME_HEADER_BYTES + max(
    layout.size + REST_BYTES_MAX.get(kind, 0) for kind, layout in FIXED_LAYOUTS.items()
)
"""The largest frame: an `AppendEntries`."""


def encode_header(kind: FrameKind, length: int, epoch: int, version: int = HELLO_VERSION) -> bytes:
    return _HEADER.pack(length, kind, version, 0, epoch)


def ping(epoch: int, version: int = HELLO_VERSION) -> bytes:
    """A frame that only keeps the connection alive."""
    return encode_header(FrameKind.PING, 0, epoch, version)


def decode_header(data: Buffer, offset: int = 0, expected_version: int = HELLO_VERSION) -> Header:
    """Decode the header at `offset`. All its bytes must be there.

    `rt.FormatError` if it is malformed, if its kind is unknown, or if the body is longer than its kind
    allows; this is raised before memory is allocated for the body. `rt.UnknownVersion` for another version
    than expected.
    """
    length, kind, version, zero, epoch = _HEADER.unpack_from(data, offset)
    if version != expected_version:
        what, hint = "a frame of another version", "Upgrade the older node."
        raise UnknownVersion(what, got=version, expected=expected_version, hint=hint)
    if kind not in FIXED_LAYOUTS or zero:
        raise FormatError(
            "invalid frame header", got=f"kind {kind}, reserved {zero}", expected="a known kind, reserved 0"
        )
    check_length(FrameKind(kind), length)
    return Header(length, kind, epoch)


def check_length(kind: FrameKind, length: int) -> None:
    least = FIXED_LAYOUTS[kind].size
    most = least + REST_BYTES_MAX.get(kind, 0)
    if not least <= length <= most:
        expected = f"{least} to {most}"
        raise FormatError(f"invalid body length of {kind.name}", got=f"{length} bytes", expected=expected)
