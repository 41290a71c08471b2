"""The messages of Raft nodes as bytes: the bodies of `frames`, all integers little-endian. Pure.

    kind                       body
     1 PING                    empty
     2 HELLO                   cluster 16, epoch 8, claim, wants bootstrap 1
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

    place: index 8, term 8; at index 0 the term is 0          claim: disk 16, joined place
    a boolean is 1 or 0; the entries of APPEND_ENTRIES have the indices after prev

Invariants:
- What `decode` returns is within every limit of `model.messages`. Any other bytes raise `rt.FormatError`.
- Neither direction uses more memory than a small multiple of the bytes that it gets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from operator import le
from typing import Any, Final, assert_never

from rt.errors import FormatError
from sequencer.raft.model.messages import (
    APPEND_BYTES_MAX,
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
from sequencer.raft.transport.frames import (
    APPEND_ENTRIES_MAX,
    ENTRY_TABLE_BYTES,
    FIXED_LAYOUTS,
    NUMBER_MAX,
    REST_BYTES_MAX,
    Buffer,
    FrameKind,
    check_length,
    encode_header,
)


def encode(message: Message | Hello, epoch: int) -> list[bytes]:
    """The frame of a message, as pieces to be sent in order. Contents are not copied.

    The caller must keep the limits: AssertionError or struct.error otherwise.
    """
    match message:
        case AppendEntries():
            return _encode_append_entries(message, epoch)
        case AppendEntriesReply(term, matched, prev, index, claim):
            return _frame(FrameKind.APPEND_ENTRIES_REPLY, epoch, term, matched, prev, index, *_flat(claim))
        case Forward(content):
            return _frame(FrameKind.FORWARD, epoch, rest=content)
        case InstallSnapshot(term, snapshot, length, digest, offset, data):
            assert len(digest) == DIGEST_BYTES, digest
            fields = term, *snapshot, length, digest, offset
            return _frame(FrameKind.INSTALL_SNAPSHOT, epoch, *fields, rest=data)
        case InstallSnapshotReply(term, snapshot, reached, offset, installed, claim):
            reply = term, *snapshot, reached, offset, installed, *_flat(claim)
            return _frame(FrameKind.INSTALL_SNAPSHOT_REPLY, epoch, *reply)
        case RequestVote(term, last, claim, pre, called):
            return _frame(FrameKind.REQUEST_VOTE, epoch, term, *last, *_flat(claim), pre, called)
        case TimeoutNow(term):
            return _frame(FrameKind.TIMEOUT_NOW, epoch, term)
        case RequestVoteReply(term, granted, claim, pre):
            return _frame(FrameKind.REQUEST_VOTE_REPLY, epoch, term, granted, *_flat(claim), pre)
        case Admit(content):
            return _frame(FrameKind.ADMIT, epoch, rest=content)
        case AppMessage(content):
            return _frame(FrameKind.APP_MESSAGE, epoch, rest=content)
        case FetchState(offset, digest):
            assert len(digest) == DIGEST_BYTES, digest
            return _frame(FrameKind.FETCH_STATE, epoch, digest, offset)
        case FetchStateChunk(snapshot, length, digest, offset, data):
            assert len(digest) == DIGEST_BYTES, digest
            return _frame(FrameKind.FETCH_STATE_CHUNK, epoch, *snapshot, length, digest, offset, rest=data)
        case Hello(cluster, own_epoch, claim, wants_bootstrap):
            assert len(cluster) == ID_BYTES, cluster
            return _frame(FrameKind.HELLO, epoch, cluster, own_epoch, *_flat(claim), wants_bootstrap)
        case _:
            assert_never(message)


def decode(kind: int, body: Buffer) -> Message | Hello:
    """Decode the body of a frame that is not a ping. The result does not refer to `body`.

    `rt.FormatError` for anything that `encode` does not make of a message within the limits.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise FormatError("unknown kind of message", got=kind)
    check_length(FrameKind(kind), len(body))
    fixed = FIXED_LAYOUTS[FrameKind(kind)]
    return decoder(body[fixed.size :], *fixed.unpack_from(body))


def _frame(kind: FrameKind, epoch: int, *fields: object, rest: bytes | None = None) -> list[bytes]:
    size = 0 if rest is None else len(rest)
    assert size <= REST_BYTES_MAX.get(kind, 0), size
    fixed = FIXED_LAYOUTS[kind]
    head = encode_header(kind, fixed.size + size, epoch) + fixed.pack(*fields)
    return [head] if rest is None else [head, rest]


def _flat(claim: DiskClaim) -> tuple[bytes, int, int]:
    disk, (index, term) = claim
    assert len(disk) == ID_BYTES, disk
    return disk, index, term


def _encode_append_entries(message: AppendEntries, epoch: int) -> list[bytes]:
    term, prev, commit, applied, chain, entries, wants_reply = message
    if not entries:
        return _frame(FrameKind.APPEND_ENTRIES, epoch, term, *prev, commit, applied, chain, wants_reply, 0)
    fixed = FIXED_LAYOUTS[FrameKind.APPEND_ENTRIES].pack(
        term, *prev, commit, applied, chain, wants_reply, len(entries)
    )
    contents, indexes, terms = zip(*entries, strict=True)
    sizes = list(map(len, contents))
    size, count = sum(sizes), len(entries)
    assert indexes == tuple(range(prev.index + 1, prev.index + 1 + count)), (prev, indexes)
    assert count <= APPEND_ENTRIES_MAX, count
    assert size <= APPEND_BYTES_MAX, size
    assert max(sizes) <= ENTRY_BYTES_MAX, max(sizes)
    table = struct.pack(f"<{count}I{count}Q", *sizes, *terms)
    length = len(fixed) + len(table) + size
    header = encode_header(FrameKind.APPEND_ENTRIES, length, epoch)
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
    prev = _place(prev_index, prev_term)
    _check_numbers(term, commit, applied, prev_index + count)
    if not count and not rest and prev_term <= term:
        return AppendEntries(term, prev, commit, applied, chain, (), _boolean(wants_reply))
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
    return AppendEntries(term, prev, commit, applied, chain, entries, _boolean(wants_reply))


def _decode_append_entries_reply(
    _: Buffer, term: int, matched: int, prev: int, index: int, *claim: Any
) -> AppendEntriesReply:
    _check_numbers(term, prev, index)
    return AppendEntriesReply(term, _boolean(matched), prev, index, _claim(*claim))


def _decode_install_snapshot(
    rest: Buffer, term: int, index: int, snapshot_term: int, length: int, digest: bytes, offset: int
) -> InstallSnapshot:
    _check_numbers(term)
    _check_chunk(length, offset, rest)
    _check_order(snapshot_term, term)
    return InstallSnapshot(term, _place(index, snapshot_term), length, digest, offset, bytes(rest))


def _decode_install_snapshot_reply(
    _: Buffer,
    term: int,
    index: int,
    snapshot_term: int,
    reached: int,
    offset: int,
    installed: int,
    *claim: Any,
) -> InstallSnapshotReply:
    _check_numbers(term)
    _check_offset(max(reached, offset))
    place = _place(index, snapshot_term)
    return InstallSnapshotReply(term, place, reached, offset, _boolean(installed), _claim(*claim))


def _decode_fetch_state(_: Buffer, digest: bytes, offset: int) -> FetchState:
    _check_offset(offset)
    return FetchState(offset, digest)


def _decode_fetch_state_chunk(
    rest: Buffer, index: int, term: int, length: int, digest: bytes, offset: int
) -> FetchStateChunk:
    _check_chunk(length, offset, rest)
    return FetchStateChunk(_place(index, term), length, digest, offset, bytes(rest))


def _decode_request_vote(
    _: Buffer, term: int, index: int, last_term: int, *claim_and_flags: Any
) -> RequestVote:
    *claim, pre, called = claim_and_flags
    _check_numbers(term)
    _check_order(last_term, term)
    return RequestVote(term, _place(index, last_term), _claim(*claim), _boolean(pre), _boolean(called))


def _decode_timeout_now(_: Buffer, term: int) -> TimeoutNow:
    _check_numbers(term)
    return TimeoutNow(term)


def _decode_request_vote_reply(_: Buffer, term: int, granted: int, *claim_and_pre: Any) -> RequestVoteReply:
    *claim, pre = claim_and_pre
    _check_numbers(term)
    return RequestVoteReply(term, _boolean(granted), _claim(*claim), _boolean(pre))


def _decode_hello(_: Buffer, cluster: bytes, epoch: int, *claim_and_wish: Any) -> Hello:
    *claim, wants_bootstrap = claim_and_wish
    _check_numbers(epoch)
    return Hello(cluster, epoch, _claim(*claim), _boolean(wants_bootstrap))


_DECODERS: Final[Mapping[int, Callable[..., Message | Hello]]] = {
    FrameKind.HELLO: _decode_hello,
    FrameKind.REQUEST_VOTE: _decode_request_vote,
    FrameKind.REQUEST_VOTE_REPLY: _decode_request_vote_reply,
    FrameKind.APPEND_ENTRIES: _decode_append_entries,
    FrameKind.APPEND_ENTRIES_REPLY: _decode_append_entries_reply,
    FrameKind.INSTALL_SNAPSHOT: _decode_install_snapshot,
    FrameKind.INSTALL_SNAPSHOT_REPLY: _decode_install_snapshot_reply,
    FrameKind.FORWARD: lambda rest: Forward(bytes(rest)),
    FrameKind.ADMIT: lambda rest: Admit(bytes(rest)),
    FrameKind.APP_MESSAGE: lambda rest: AppMessage(bytes(rest)),
    FrameKind.TIMEOUT_NOW: _decode_timeout_now,
    FrameKind.FETCH_STATE: _decode_fetch_state,
    FrameKind.FETCH_STATE_CHUNK: _decode_fetch_state_chunk,
}


def _check_chunk(length: int, offset: int, data: Buffer) -> None:
    if length > SNAPSHOT_BYTES_MAX or offset + len(data) > length:
        got = f"{len(data)} bytes at {offset} of {length}"
        raise FormatError("a chunk exceeds its snapshot", got=got, expected=f"at most {SNAPSHOT_BYTES_MAX}")


def _check_offset(offset: int) -> None:
    if offset > SNAPSHOT_BYTES_MAX:
        expected = f"at most {SNAPSHOT_BYTES_MAX}"
        raise FormatError("offset above the maximum size of a snapshot", got=offset, expected=expected)


def _check_numbers(*numbers: int) -> None:
    if max(numbers) > NUMBER_MAX:
        raise FormatError("number out of range", got=max(numbers), expected=f"at most {NUMBER_MAX}")


def _check_order(earlier: int, term: int) -> None:
    if earlier > term:
        expected = f"at most {term}"
        raise FormatError("an earlier term is above the current term", got=earlier, expected=expected)


def _place(index: int, term: int) -> LogIndex:
    _check_numbers(index, term)
    if term and not index:
        raise FormatError("a term without an entry", got=f"index 0, term {term}", expected="term 0")
    return LogIndex(index, term)


def _claim(disk: bytes, index: int, term: int) -> DiskClaim:
    return DiskClaim(disk, _place(index, term))


def _boolean(byte: int) -> bool:
    if byte > 1:
        raise FormatError("invalid boolean", got=byte, expected="0 or 1")
    return byte == 1
