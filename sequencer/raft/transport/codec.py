"""The messages of Raft nodes as bytes: the bodies of `frames`, all integers little-endian. Pure.

    kind                       body
     1 PING                    empty
     2 HELLO                   cluster 16, epoch 8, claim, wants bootstrap 1; then, unless it is version 1
                               only: oldest version 1, latest version 1; a receiver ignores what follows
     3 REQUEST_VOTE            term 8, last place, claim, pre 1, called 1
     4 REQUEST_VOTE_REPLY      term 8, granted 1, claim, pre 1
     5 APPEND_ENTRIES          term 8, prev place, commit 8, applied 8, chain 8, wants reply 1, count 4,
                               count times: bytes of the content 4; count times: term 8; the contents
     6 APPEND_ENTRIES_REPLY    term 8, matched 1, prev 8, index 8, claim
     7 INSTALL_SNAPSHOT        term 8, snapshot place, length 8, digest 32, offset 8, data
     8 INSTALL_SNAPSHOT_REPLY  term 8, snapshot place, reached 8, offset 8, installed 1, claim
     9 FORWARD                 content
    10 ADMIT                   content
    11 APP_MESSAGE             content
    12 TIMEOUT_NOW             term 8
    13 FETCH_STATE             digest 32, offset 8
    14 FETCH_STATE_CHUNK       snapshot place, length 8, digest 32, offset 8, data
    15 MEMBER_LIST             index 8, committed 1, content of an entry with the list

    place: index 8, term 8; at index 0 the term is 0          claim: disk 16, joined place
    a boolean is 1 or 0; the entries of APPEND_ENTRIES have the indices after prev

Invariants:
- A message that `decode` returns is within every limit of `model.messages`. Any other bytes raise
  `rt.FormatError`.
- Neither direction uses more memory than a small multiple of its input bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from operator import le
from typing import Any, Final, TypeAlias, cast

from replicator.protocol.version import common_version, range_of
from rt.errors import FormatError
from sequencer.raft.model.messages import (
    APPEND_BYTES_MAX,
    ENTRY_BYTES_MAX,
    SNAPSHOT_BYTES_MAX,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    AppMessage,
    DiskClaim,
    FetchState,
    FetchStateChunk,
    Forward,
    Hello,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    MemberList,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from sequencer.raft.transport.frames import (
    APPEND_ENTRIES_MAX,
    ENTRY_TABLE_BYTES,
    FIXED_LAYOUTS,
    HELLO_VERSION,
    NUMBER_MAX,
    REST_BYTES_MAX,
    VERSIONS,
    Buffer,
    FrameKind,
    check_length,
    encode_header,
)


def encode(message: Message | Hello, epoch: int, version: int = HELLO_VERSION) -> list[bytes]:
    """The frame of a message, as pieces to be sent in order. Contents are not copied.

    `version`: the protocol version that both sides use. The caller must keep the limits: AssertionError or
    struct.error otherwise.
    """
    if isinstance(message, AppendEntries):
        return _encode_append_entries(message, epoch, version)
    kind = _KINDS[type(message)]
    if isinstance(message, Hello):
        known = bytes(() if VERSIONS.latest == HELLO_VERSION else VERSIONS)
        return [_encode_fixed(kind, epoch, message, len(known)) + known]
    if kind not in REST_BYTES_MAX:
        return [_encode_fixed(kind, epoch, message, 0, version)]
    *fields, rest = cast("tuple[Any, ...]", message)
    assert len(rest) <= REST_BYTES_MAX[kind], len(rest)
    return [_encode_fixed(kind, epoch, fields, len(rest), version), rest]


def version_with(body: Buffer, peer: str) -> int:
    """The version to use with the sender of this hello. `rt.UnknownVersion` if there is no common one."""
    said = body[FIXED_LAYOUTS[FrameKind.HELLO].size :]
    return common_version(
        VERSIONS, range_of(*said[:2]) if len(said) > 1 else range_of(1, 1), f"member {peer}"
    )


class FrameEncoder:
    """The frames of one node, in the epoch of its hello. A message for several peers is encoded once."""

    def __init__(self, hello: Hello) -> None:
        self.epoch = hello.epoch
        self.hello = b"".join(encode(hello, hello.epoch))
        self._latest: tuple[Message, int, list[bytes], int] | None = None

    def encode(self, message: Message, version: int) -> tuple[list[bytes], int]:
        """Like `encode`, with the size in bytes."""
        latest = self._latest
        if latest is None or latest[0] is not message or latest[1] != version:
            buffers = encode(message, self.epoch, version)
            latest = self._latest = message, version, buffers, sum(map(len, buffers))
        return latest[2:]

    def forget(self) -> None:
        self._latest = None


def decode(kind: int, body: Buffer) -> Message | Hello:
    """Decode the body of a frame that is not a ping. The result does not refer to `body`.

    `rt.FormatError` for any body that `encode` does not produce from a message within the limits.
    """
    if kind not in _FIELDS and kind != FrameKind.APPEND_ENTRIES:
        raise FormatError("unknown kind of message", got=kind)
    kind = FrameKind(kind)
    check_length(kind, len(body))
    fixed = FIXED_LAYOUTS[kind]
    values = fixed.unpack_from(body)
    if kind is FrameKind.APPEND_ENTRIES:
        return _decode_append_entries(body[fixed.size :], *values)
    make, *readers = _FIELDS[kind]
    unread = iter(values)
    fields = [read(unread) for read in readers]
    if kind in REST_BYTES_MAX and kind is not FrameKind.HELLO:
        fields.append(bytes(body[fixed.size :]))
    message: Message | Hello = make(*fields)
    match message:
        case RequestVote(term, last):
            _check_order(last, term)
        case InstallSnapshot(term, snapshot, length, _, offset, data):
            _check_order(snapshot, term)
            _check_chunk(length, offset, data)
        case FetchStateChunk(_, length, _, offset, data):
            _check_chunk(length, offset, data)
    return message


def _encode_fixed(
    kind: FrameKind, epoch: int, fields: Iterable[Any], rest_bytes: int, version: int = HELLO_VERSION
) -> bytes:
    """The header and the fixed part."""
    fixed = FIXED_LAYOUTS[kind]
    flat = [*_flat(fields)]
    assert [len(one) for one in flat if type(one) is bytes] == _WIDTHS[kind], flat
    return encode_header(kind, fixed.size + rest_bytes, epoch, version) + fixed.pack(*flat)


def _flat(fields: Iterable[Any]) -> Iterator[Any]:
    for field in fields:
        if isinstance(field, tuple):
            yield from _flat(field)
        else:
            yield field


def _encode_append_entries(message: AppendEntries, epoch: int, version: int) -> list[bytes]:
    term, prev, commit, applied, chain, entries, wants_reply = message
    count, kind = len(entries), FrameKind.APPEND_ENTRIES
    assert count <= APPEND_ENTRIES_MAX, count
    contents, indexes, terms = zip(*entries, strict=True) if entries else ((), (), ())
    assert indexes == tuple(range(prev.index + 1, prev.index + 1 + count)), (prev, indexes)
    sizes = list(map(len, contents))
    size = sum(sizes)
    assert size <= APPEND_BYTES_MAX, size
    assert max(sizes, default=0) <= ENTRY_BYTES_MAX, max(sizes)
    fixed = FIXED_LAYOUTS[kind].pack(term, *prev, commit, applied, chain, wants_reply, count)
    table = struct.pack(f"<{count}I{count}Q", *sizes, *terms)
    header = encode_header(kind, len(fixed) + len(table) + size, epoch, version)
    return [header + fixed + table, *contents]


def _decode_append_entries(
    rest: Buffer,
    term: int,
    prev_index: int,
    prev_term: int,
    commit: int,
    applied: int,
    chain: int,
    wants_reply: int,
    count: int,
) -> AppendEntries:
    prev = _place(iter((prev_index, prev_term)))
    _number(iter((max(term, commit, applied, prev_index + count),)))
    is_asking = _flag(iter((wants_reply,)))
    if not count and not rest and prev_term <= term:
        return AppendEntries(term, prev, commit, applied, chain, (), is_asking)
    start = count * ENTRY_TABLE_BYTES
    if count > APPEND_ENTRIES_MAX or start > len(rest):
        raise FormatError(
            "the count of entries does not match the body",
            got=count,
            expected=f"{len(rest)} bytes of entries",
        )
    table = struct.unpack_from(f"<{count}I{count}Q", rest)
    sizes, terms = table[:count], table[count:]
    if max(sizes, default=0) > ENTRY_BYTES_MAX:
        raise FormatError(
            "an entry exceeds the size limit", got=max(sizes), expected=f"at most {ENTRY_BYTES_MAX} bytes"
        )
    if not all(map(le, (prev_term, *terms), (*terms, term))):
        got = (prev_term, *terms[:3], term)
        raise FormatError("terms decrease", got=got, expected="terms in ascending order")
    ends = list(accumulate(sizes, initial=start))
    size = ends[-1] - start
    if ends[-1] != len(rest) or size > APPEND_BYTES_MAX:
        expected = len(rest) - start
        raise FormatError("the contents do not match their lengths", got=f"{size} bytes", expected=expected)
    contents = [bytes(rest[low:high]) for low, high in pairwise(ends)]
    entries = tuple(map(RaftEntry, contents, range(prev_index + 1, prev_index + 1 + count), terms))
    return AppendEntries(term, prev, commit, applied, chain, entries, is_asking)


# The readers of the fields of the other messages. Each reader takes its values, and raises `rt.FormatError`
# for invalid ones.

_Values: TypeAlias = Iterator[Any]


def _number(values: _Values, most: int = NUMBER_MAX) -> int:
    number: int = next(values)
    if number > most:
        raise FormatError("number out of range", got=number, expected=f"at most {most}")
    return number


def _offset(values: _Values) -> int:
    """An offset in a snapshot, or its length."""
    return _number(values, SNAPSHOT_BYTES_MAX)


def _place(values: _Values) -> LogIndex:
    index, term = _number(values), _number(values)
    if term and not index:
        raise FormatError("a term without an entry", got=f"index 0, term {term}", expected="term 0")
    return LogIndex(index, term)


def _claim(values: _Values) -> DiskClaim:
    return DiskClaim(next(values), _place(values))


def _flag(values: _Values) -> bool:
    byte = next(values)
    if byte > 1:
        raise FormatError("invalid boolean", got=byte, expected="0 or 1")
    return bool(byte)


_FIELDS: Final[Mapping[int, tuple[Callable[..., Any], ...]]] = {
    FrameKind.HELLO: (Hello, next, _number, _claim, _flag),
    FrameKind.REQUEST_VOTE: (RequestVote, _number, _place, _claim, _flag, _flag),
    FrameKind.REQUEST_VOTE_REPLY: (RequestVoteReply, _number, _flag, _claim, _flag),
    FrameKind.APPEND_ENTRIES_REPLY: (AppendEntriesReply, _number, _flag, _number, _number, _claim),
    FrameKind.INSTALL_SNAPSHOT: (InstallSnapshot, _number, _place, _offset, next, _offset),
    FrameKind.INSTALL_SNAPSHOT_REPLY: (
        InstallSnapshotReply,
        _number,
        _place,
        _offset,
        _offset,
        _flag,
        _claim,
    ),
    FrameKind.FORWARD: (Forward,),
    FrameKind.ADMIT: (Admit,),
    FrameKind.APP_MESSAGE: (AppMessage,),
    FrameKind.TIMEOUT_NOW: (TimeoutNow, _number),
    FrameKind.FETCH_STATE: (FetchState, next, _offset),
    FrameKind.FETCH_STATE_CHUNK: (FetchStateChunk, _place, _offset, next, _offset),
    FrameKind.MEMBER_LIST: (MemberList, _number, _flag),
}
"""The class of each message, and the readers of its fields. The bytes after the fixed part are the last
field.
"""
_KINDS: Final = {make: FrameKind(kind) for kind, (make, *_) in _FIELDS.items()}
_WIDTHS: Final = {
    kind: [int(size) for size in re.findall(r"(\d+)s", layout.format)]
    for kind, layout in FIXED_LAYOUTS.items()
}
"""The sizes of the ids and digests of each kind."""


def _check_chunk(length: int, offset: int, data: bytes) -> None:
    if offset + len(data) > length:
        got = f"{len(data)} bytes at {offset} of {length}"
        raise FormatError("a chunk exceeds its snapshot", got=got, expected=f"up to {length}")


def _check_order(place: LogIndex, term: int) -> None:
    if place.term > term:
        expected = f"at most {term}"
        raise FormatError("an earlier term is above the current term", got=place.term, expected=expected)
