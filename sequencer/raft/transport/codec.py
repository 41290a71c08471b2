"""Messages of Raft nodes as bytes: frames of a header and a body, all integers little-endian.

    header, 16 bytes                             epoch is the sender's cluster epoch
        offset  bytes  field
             0      4  bytes of the body
             4      1  kind
             5      1  version of this codec, 1
             6      2  0
             8      8  epoch

    kind            body
     1 PING         nothing
     2 HELLO        cluster 16, epoch 8, claim, wants bootstrap 1
     3 REQUEST_VOTE term 8, last place, claim, pre 1, called 1
     4 VOTE_REPLY   term 8, granted 1, claim, pre 1
     5 APPEND       term 8, prev place, commit 8, applied 8, chain 8, wants reply 1, count 4,
                    count times: bytes of the content 4; count times: term 8; the contents
     6 APPEND_REPLY term 8, matched 1, prev 8, index 8, claim
     7 CHUNK        term 8, snapshot place, length 8, digest 32, offset 8, data
     8 CHUNK_REPLY  term 8, snapshot place, reached 8, offset 8, installed 1, claim
     9 FORWARD      content
    10 ADOPT        content
    11 TELL         content
    12 STAND_NOW    term 8
    13 ASK_STATE    digest 32, offset 8
    14 STATE_PIECE  snapshot place, length 8, digest 32, offset 8, data

    place: index 8, term 8; at index 0 the term is 0          claim: disk 16, joined place
    a byte that says yes or no is 1 or 0; the entries of an APPEND have the indexes behind prev

Pure. The law: what `decode` returns is within every bound of `messages`, and any other bytes give
`rt.FormatError`; neither takes more memory than a small multiple of the bytes it was given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import accumulate, pairwise
from operator import le
from typing import Final, NamedTuple, TypeAlias, assert_never

from rt.errors import FormatError, UnknownVersion
from sequencer.raft.model.messages import (
    APPEND_BYTES_MAX,
    CHUNK_BYTES_MAX,
    COMMAND_BYTES_MAX,
    DIGEST_BYTES,
    ENTRY_BYTES_MAX,
    ID_BYTES,
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
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)

Buffer: TypeAlias = bytes | memoryview

VERSION: Final = 1
APPEND_ENTRIES_MAX: Final = 1 << 17
"""The most entries of one `AppendEntries`: as many as `APPEND_BYTES_MAX` holds at 16 bytes each."""
NUMBER_MAX: Final = (1 << 63) - 1
"""The largest index, term or offset: what a signed 64-bit integer holds, here and in the files."""


class FrameKind(IntEnum):
    """What a frame holds."""

    PING = 1
    HELLO = 2
    REQUEST_VOTE = 3
    VOTE_REPLY = 4
    APPEND = 5
    APPEND_REPLY = 6
    CHUNK = 7
    CHUNK_REPLY = 8
    FORWARD = 9
    ADOPT = 10
    TELL = 11
    STAND_NOW = 12
    ASK_STATE = 13
    STATE_PIECE = 14


class Header(NamedTuple):
    """The first bytes of a frame, checked: `length` is one that the body of this kind may have."""

    length: int
    kind: int
    epoch: int


_HEADER: Final = struct.Struct("<IBBHQ")
_CLAIM: Final = f"{ID_BYTES}sQQ"
_HELLO: Final = struct.Struct(f"<{ID_BYTES}sQ{_CLAIM}B")
_REQUEST_VOTE: Final = struct.Struct(f"<QQQ{_CLAIM}BB")
_STAND_NOW: Final = struct.Struct("<Q")
_VOTE_REPLY: Final = struct.Struct(f"<QB{_CLAIM}B")
_APPEND: Final = struct.Struct("<QQQQQQBI")
_APPEND_REPLY: Final = struct.Struct(f"<QBQQ{_CLAIM}")
_CHUNK: Final = struct.Struct(f"<QQQQ{DIGEST_BYTES}sQ")
_CHUNK_REPLY: Final = struct.Struct(f"<QQQQQB{_CLAIM}")
_ASK_STATE: Final = struct.Struct(f"<{DIGEST_BYTES}sQ")
_STATE_PIECE: Final = struct.Struct(f"<QQQ{DIGEST_BYTES}sQ")
_ENTRY_BYTES: Final = 12
"""What an entry costs beside its content."""

FRAME_HEADER_BYTES: Final = _HEADER.size
_BODY_BYTES: Final[Mapping[int, tuple[int, int]]] = {
    FrameKind.PING: (0, 0),
    FrameKind.HELLO: (_HELLO.size, _HELLO.size),
    FrameKind.REQUEST_VOTE: (_REQUEST_VOTE.size, _REQUEST_VOTE.size),
    FrameKind.VOTE_REPLY: (_VOTE_REPLY.size, _VOTE_REPLY.size),
    FrameKind.APPEND: (_APPEND.size, _APPEND.size + APPEND_ENTRIES_MAX * _ENTRY_BYTES + APPEND_BYTES_MAX),
    FrameKind.APPEND_REPLY: (_APPEND_REPLY.size, _APPEND_REPLY.size),
    FrameKind.CHUNK: (_CHUNK.size, _CHUNK.size + CHUNK_BYTES_MAX),
    FrameKind.CHUNK_REPLY: (_CHUNK_REPLY.size, _CHUNK_REPLY.size),
    FrameKind.FORWARD: (0, ENTRY_BYTES_MAX),
    FrameKind.ADOPT: (0, CHUNK_BYTES_MAX),
    FrameKind.TELL: (0, COMMAND_BYTES_MAX),
    FrameKind.STAND_NOW: (_STAND_NOW.size, _STAND_NOW.size),
    FrameKind.ASK_STATE: (_ASK_STATE.size, _ASK_STATE.size),
    FrameKind.STATE_PIECE: (_STATE_PIECE.size, _STATE_PIECE.size + CHUNK_BYTES_MAX),
}
"""The fewest and the most bytes of each kind's body."""
FRAME_BYTES_MAX: Final = FRAME_HEADER_BYTES + max(most for _, most in _BODY_BYTES.values())
"""The largest frame: an `AppendEntries`."""


def encode(message: Message | Hello, epoch: int) -> list[bytes]:
    """The frame of a message as pieces to be sent one behind the other; contents are not copied.

    A message above the bounds that `decode` keeps is a mistake of the caller: AssertionError or struct.error.
    """
    match message:
        case AppendEntries():
            return _encode_append(message, epoch)
        case AppendEntriesReply(term, matched, prev, index, claim):
            return [
                _frame(
                    FrameKind.APPEND_REPLY, epoch, _APPEND_REPLY, term, matched, prev, index, *_flat(claim)
                )
            ]
        case Forward(content):
            assert len(content) <= ENTRY_BYTES_MAX, len(content)
            return [_HEADER.pack(len(content), FrameKind.FORWARD, VERSION, 0, epoch), content]
        case InstallSnapshot(term, snapshot, length, digest, offset, data):
            assert len(digest) == DIGEST_BYTES, digest
            assert len(data) <= CHUNK_BYTES_MAX, len(data)
            body = _CHUNK.pack(term, *snapshot, length, digest, offset)
            return [_HEADER.pack(len(body) + len(data), FrameKind.CHUNK, VERSION, 0, epoch) + body, data]
        case InstallSnapshotReply(term, snapshot, reached, offset, installed, claim):
            fields = term, *snapshot, reached, offset, installed, *_flat(claim)
            return [_frame(FrameKind.CHUNK_REPLY, epoch, _CHUNK_REPLY, *fields)]
        case RequestVote(term, last, claim, pre, called):
            return [
                _frame(FrameKind.REQUEST_VOTE, epoch, _REQUEST_VOTE, term, *last, *_flat(claim), pre, called)
            ]
        case TimeoutNow(term):
            return [_frame(FrameKind.STAND_NOW, epoch, _STAND_NOW, term)]
        case RequestVoteReply(term, granted, claim, pre):
            return [_frame(FrameKind.VOTE_REPLY, epoch, _VOTE_REPLY, term, granted, *_flat(claim), pre)]
        case Admit(content):
            assert len(content) <= CHUNK_BYTES_MAX, len(content)
            return [_HEADER.pack(len(content), FrameKind.ADOPT, VERSION, 0, epoch), content]
        case AppMessage(content):
            assert len(content) <= COMMAND_BYTES_MAX, len(content)
            return [_HEADER.pack(len(content), FrameKind.TELL, VERSION, 0, epoch), content]
        case FetchState(offset, digest):
            assert len(digest) == DIGEST_BYTES, digest
            return [_frame(FrameKind.ASK_STATE, epoch, _ASK_STATE, digest, offset)]
        case FetchStateChunk(snapshot, length, digest, offset, data):
            assert len(digest) == DIGEST_BYTES, digest
            assert len(data) <= CHUNK_BYTES_MAX, len(data)
            body = _STATE_PIECE.pack(*snapshot, length, digest, offset)
            return [
                _HEADER.pack(len(body) + len(data), FrameKind.STATE_PIECE, VERSION, 0, epoch) + body,
                data,
            ]
        case Hello(cluster, own_epoch, claim, wants_bootstrap):
            assert len(cluster) == ID_BYTES, cluster
            return [
                _frame(FrameKind.HELLO, epoch, _HELLO, cluster, own_epoch, *_flat(claim), wants_bootstrap)
            ]
        case _:
            assert_never(message)


def ping(epoch: int) -> bytes:
    """A frame that only says that the sender lives."""
    return _HEADER.pack(0, FrameKind.PING, VERSION, 0, epoch)


def decode_header(data: Buffer, offset: int = 0) -> Header:
    """The header of the frame at `offset` of `data`, which holds all of it.

    `rt.FormatError` if it is malformed, of an unknown kind or longer than its kind may be, so that no memory
    is had for it; `rt.UnknownVersion`.
    """
    length, kind, version, zero, epoch = _HEADER.unpack_from(data, offset)
    if version != VERSION:
        raise UnknownVersion("unknown frame version", got=version, expected=VERSION)
    if kind not in _BODY_BYTES or zero:
        raise FormatError(
            "invalid frame header", got=f"kind {kind}, reserved {zero}", expected="a known kind, reserved 0"
        )
    _check_length(kind, length)
    return Header(length, kind, epoch)


def decode(kind: int, body: Buffer) -> Message | Hello:
    """The message in the body of a frame of this kind, a ping excepted; it keeps no hold of `body`.

    `rt.FormatError` for anything that `encode` would not have made of a message within its bounds.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise FormatError("unknown kind of message", got=kind)
    _check_length(kind, len(body))
    return decoder(body)


def _frame(kind: FrameKind, epoch: int, layout: struct.Struct, *fields: object) -> bytes:
    return _HEADER.pack(layout.size, kind, VERSION, 0, epoch) + layout.pack(*fields)


def _flat(claim: DiskClaim) -> tuple[bytes, int, int]:
    disk, (index, term) = claim
    assert len(disk) == ID_BYTES, disk
    return disk, index, term


def _encode_append(message: AppendEntries, epoch: int) -> list[bytes]:
    term, prev, commit, applied, chain, entries, wants_reply = message
    fixed = _APPEND.pack(term, *prev, commit, applied, chain, wants_reply, len(entries))
    if not entries:
        return [_HEADER.pack(len(fixed), FrameKind.APPEND, VERSION, 0, epoch) + fixed]
    contents, indexes, terms = zip(*entries, strict=True)
    sizes = list(map(len, contents))
    size, count = sum(sizes), len(entries)
    assert indexes == tuple(range(prev.index + 1, prev.index + 1 + count)), (prev, indexes)
    assert count <= APPEND_ENTRIES_MAX, count
    assert size <= APPEND_BYTES_MAX, size
    assert max(sizes) <= ENTRY_BYTES_MAX, max(sizes)
    table = struct.pack(f"<{count}I{count}Q", *sizes, *terms)
    header = _HEADER.pack(len(fixed) + len(table) + size, FrameKind.APPEND, VERSION, 0, epoch)
    return [header + fixed + table, *contents]


def _decode_append(body: Buffer) -> AppendEntries:
    term, prev_index, prev_term, commit, applied, chain, wants_reply, count = _APPEND.unpack_from(body)
    prev = _place(prev_index, prev_term)
    _check_numbers(term, commit, applied, prev_index + count)
    if not count and len(body) == _APPEND.size and prev_term <= term:
        return AppendEntries(term, prev, commit, applied, chain, (), _yes_or_no(wants_reply))
    start = _APPEND.size + count * _ENTRY_BYTES
    if count > APPEND_ENTRIES_MAX or start > len(body):
        raise FormatError(
            "the count of entries does not match the body", got=count, expected=f"{len(body)} bytes of body"
        )
    table = struct.unpack_from(f"<{count}I{count}Q", body, _APPEND.size)
    sizes, terms = table[:count], table[count:]
    if max(sizes, default=0) > ENTRY_BYTES_MAX:
        raise FormatError(
            "an entry exceeds the size limit", got=max(sizes), expected=f"at most {ENTRY_BYTES_MAX} bytes"
        )
    if not all(map(le, (prev_term, *terms), (*terms, term))):
        raise FormatError(
            "terms decrease", got=(prev_term, *terms[:3], term), expected="terms in ascending order"
        )
    ends = list(accumulate(sizes, initial=start))
    if ends[-1] != len(body) or ends[-1] - start > APPEND_BYTES_MAX:
        raise FormatError(
            "the contents do not match their lengths",
            got=f"{ends[-1] - start} bytes",
            expected=len(body) - start,
        )
    contents = [bytes(body[low:high]) for low, high in pairwise(ends)]
    entries = tuple(map(RaftEntry, contents, range(prev_index + 1, prev_index + 1 + count), terms))
    return AppendEntries(term, prev, commit, applied, chain, entries, _yes_or_no(wants_reply))


def _decode_append_reply(body: Buffer) -> AppendEntriesReply:
    term, matched, prev, index, *claim = _APPEND_REPLY.unpack(body)
    _check_numbers(term, prev, index)
    return AppendEntriesReply(term, _yes_or_no(matched), prev, index, _claim(*claim))


def _decode_chunk(body: Buffer) -> InstallSnapshot:
    term, index, snapshot_term, length, digest, offset = _CHUNK.unpack_from(body)
    _check_numbers(term)
    data = bytes(body[_CHUNK.size :])
    _check_piece(length, offset, data)
    _check_order(snapshot_term, term)
    return InstallSnapshot(term, _place(index, snapshot_term), length, digest, offset, data)


def _decode_chunk_reply(body: Buffer) -> InstallSnapshotReply:
    term, index, snapshot_term, reached, offset, installed, *claim = _CHUNK_REPLY.unpack(body)
    _check_numbers(term)
    if max(reached, offset) > SNAPSHOT_BYTES_MAX:
        got, wanted = max(reached, offset), f"at most {SNAPSHOT_BYTES_MAX}"
        raise FormatError("offset above the maximum size of a snapshot", got=got, expected=wanted)
    place = _place(index, snapshot_term)
    return InstallSnapshotReply(term, place, reached, offset, _yes_or_no(installed), _claim(*claim))


def _decode_ask_state(body: Buffer) -> FetchState:
    digest, offset = _ASK_STATE.unpack(body)
    if offset > SNAPSHOT_BYTES_MAX:
        raise FormatError(
            "offset above the maximum size of a snapshot",
            got=offset,
            expected=f"at most {SNAPSHOT_BYTES_MAX}",
        )
    return FetchState(offset, digest)


def _decode_state_piece(body: Buffer) -> FetchStateChunk:
    index, term, length, digest, offset = _STATE_PIECE.unpack_from(body)
    data = bytes(body[_STATE_PIECE.size :])
    _check_piece(length, offset, data)
    return FetchStateChunk(_place(index, term), length, digest, offset, data)


def _decode_request_vote(body: Buffer) -> RequestVote:
    term, index, last_term, disk, joined_index, joined_term, pre, called = _REQUEST_VOTE.unpack(body)
    _check_numbers(term)
    _check_order(last_term, term)
    claim = _claim(disk, joined_index, joined_term)
    return RequestVote(term, _place(index, last_term), claim, _yes_or_no(pre), _yes_or_no(called))


def _decode_stand_now(body: Buffer) -> TimeoutNow:
    (term,) = _STAND_NOW.unpack(body)
    _check_numbers(term)
    return TimeoutNow(term)


def _decode_vote_reply(body: Buffer) -> RequestVoteReply:
    term, granted, disk, joined_index, joined_term, pre = _VOTE_REPLY.unpack(body)
    _check_numbers(term)
    return RequestVoteReply(
        term, _yes_or_no(granted), _claim(disk, joined_index, joined_term), _yes_or_no(pre)
    )


def _decode_hello(body: Buffer) -> Hello:
    cluster, epoch, disk, joined_index, joined_term, wants_bootstrap = _HELLO.unpack(body)
    _check_numbers(epoch)
    return Hello(cluster, epoch, _claim(disk, joined_index, joined_term), _yes_or_no(wants_bootstrap))


_DECODERS: Final[Mapping[int, Callable[[Buffer], Message | Hello]]] = {
    FrameKind.HELLO: _decode_hello,
    FrameKind.REQUEST_VOTE: _decode_request_vote,
    FrameKind.VOTE_REPLY: _decode_vote_reply,
    FrameKind.APPEND: _decode_append,
    FrameKind.APPEND_REPLY: _decode_append_reply,
    FrameKind.CHUNK: _decode_chunk,
    FrameKind.CHUNK_REPLY: _decode_chunk_reply,
    FrameKind.FORWARD: lambda body: Forward(bytes(body)),
    FrameKind.ADOPT: lambda body: Admit(bytes(body)),
    FrameKind.TELL: lambda body: AppMessage(bytes(body)),
    FrameKind.STAND_NOW: _decode_stand_now,
    FrameKind.ASK_STATE: _decode_ask_state,
    FrameKind.STATE_PIECE: _decode_state_piece,
}


def _check_length(kind: int, length: int) -> None:
    fewest, most = _BODY_BYTES[kind]
    if not fewest <= length <= most:
        name = FrameKind(kind).name
        raise FormatError(
            f"invalid body length of {name}", got=f"{length} bytes", expected=f"{fewest} to {most}"
        )


def _check_piece(length: int, offset: int, data: bytes) -> None:
    if length > SNAPSHOT_BYTES_MAX or offset + len(data) > length:
        got = f"{len(data)} bytes at {offset} of {length}"
        raise FormatError("a chunk exceeds its snapshot", got=got, expected=f"at most {SNAPSHOT_BYTES_MAX}")


def _check_numbers(*numbers: int) -> None:
    if max(numbers) > NUMBER_MAX:
        raise FormatError("number out of range", got=max(numbers), expected=f"at most {NUMBER_MAX}")


def _check_order(earlier: int, term: int) -> None:
    if earlier > term:
        raise FormatError(
            "an earlier term is above the current term", got=earlier, expected=f"at most {term}"
        )


def _place(index: int, term: int) -> LogIndex:
    _check_numbers(index, term)
    if term and not index:
        raise FormatError("a term without an entry", got=f"index 0, term {term}", expected="term 0")
    return LogIndex(index, term)


def _claim(disk: bytes, index: int, term: int) -> DiskClaim:
    return DiskClaim(disk, _place(index, term))


def _yes_or_no(byte: int) -> bool:
    if byte > 1:
        raise FormatError("invalid boolean", got=byte, expected="0 or 1")
    return byte == 1
