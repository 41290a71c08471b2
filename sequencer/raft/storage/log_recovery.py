"""Opening a Raft log after a crash: its files are read, checked, cut and made durable.

Invariants:
- Corruption is not treated as a torn tail. A group is written only after the previous group was synced, and a
  segment only after everything before it was synced. So a bad group may be cut only if nothing proves that it
  was synced: no later group with a valid header, no later segment, no recorded synced end above it. The bytes
  of the bad group prove nothing: a torn write may leave any of its pages.
- Nothing is changed before everything is checked. If something is corrupt, nothing is changed at all.
- When `recover_log` returns, everything that it accepted is on the medium, even if an earlier sync had
  failed. After it there are only zeros.

If only zeros follow where a group must be, up to the end of the file, the segment ends cleanly: nothing was
written there, or it was lost. The synced end or the next segment's header shows whether it was synced.
Anything else among the zeros is a bad group, even if its first page is zero.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from msgspec import Struct

from rt.errors import Corrupt, DiskFull, LogNotFound, naming_file
from rt.log.disk import Disk, File, storage_error
from rt.log.whole_files import write_whole
from sequencer.raft.model.messages import LogIndex, RaftEntry
from sequencer.raft.storage.log_entries import Entries
from sequencer.raft.storage.log_format import (
    GROUP_MAGIC,
    SEGMENT_HEADER_BYTES,
    SYNCED_END_BYTES,
    SYNCED_END_FILE,
    LogRecord,
    RaftSegmentHeader,
    RecordGroup,
    RecordKind,
    SyncedEnd,
    decode_records,
    decode_segment_header,
    encode_segment_header,
    encode_synced_end,
    group_at,
    newest_synced_end,
    parse_segment_name,
    verify_records,
)
from sequencer.raft.storage.preallocation import write_zeros
from sequencer.raft.storage.sealed_head import WIPE_HINT

_ZEROS = bytes(1 << 16)
_COPY_BYTES = 1 << 20
_SYNCED_BUT_BAD = "synced bytes of the Raft log are corrupt"


def newest_run(numbers: Iterable[int]) -> range:
    """The longest sequence of consecutive numbers that ends at the highest number: the segments of the log.

    Older segments remain from a compaction: a power cut may undo its removals in any order.
    """
    present = set(numbers)
    first = end = max(present)
    while first - 1 in present:
        first -= 1
    return range(first, end + 1)


class Replay(Struct):
    """The log that results when the segments are replayed in order."""

    header: RaftSegmentHeader
    """The header of the last segment."""
    entries: Entries
    term: int
    voted_for: str | None
    group: int
    """The number of the next group."""
    bases: list[LogIndex]
    """The `LogIndex` before the first entry of each segment."""
    end: int = SEGMENT_HEADER_BYTES
    """End of the last valid group in the last segment."""
    torn_bytes: int = 0
    """Bytes after `end` that must be cut, up to the last byte that is not zero."""


def replay_segments(
    segments: Iterable[tuple[int, str, bytearray]], newest: int, synced: SyncedEnd | None
) -> Replay:
    """Replay segments (number, path, content) with consecutive numbers up to `newest`.

    `synced`: the recorded synced end. Raises `rt.Corrupt` for anything invalid that may not be cut.
    """
    replay: Replay | None = None
    path = ""
    for number, path, data in segments:
        header = decode_segment_header(data, path=path, number=number)
        if replay is None:
            entries = Entries(header.base)
            replay = Replay(header, entries, header.term, header.voted_for, header.group, [header.base])
        else:
            _go_on(replay, header, path)
        content_end = _content_end(data)
        with memoryview(data) as view:
            problem = _replay_groups(replay, view, content_end, path)
        if problem is not None:
            later = _find_group(data, replay.end, header.seed, path)
            _check_may_be_cut(replay, problem, path, is_newest=number == newest, later=later)
            replay.torn_bytes = content_end - replay.end
        if synced is not None and number == newest:
            _check_synced_end(replay, synced, path, problem)
    assert replay is not None, "no segments"
    return replay


def _go_on(replay: Replay, header: RaftSegmentHeader, path: str) -> None:
    """Check that a segment's header matches the replayed segments before it."""
    log, last = replay.header.log, replay.entries.last
    expected = RaftSegmentHeader(header.number, log, last, replay.term, replay.voted_for, replay.group)
    if header != expected:
        raise _corrupt("a Raft log segment does not continue the previous one", path, 0, header, expected)
    replay.header = header
    replay.bases.append(header.base)


def _content_end(data: bytearray) -> int:
    """The end without trailing zeros."""
    end = len(data)
    while data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    start = max(0, end - len(_ZEROS))
    return start + len(data[start:end].rstrip(b"\0"))


def _replay_groups(replay: Replay, view: memoryview, content_end: int, path: str) -> str | None:
    """Replay groups from the segment's start. Return the problem of the first bad group, or None.

    After `content_end` there are only zeros, but a group may end with some of them.
    """
    replay.end = SEGMENT_HEADER_BYTES
    seed = replay.header.seed
    while replay.end < content_end:
        group = group_at(view, replay.end, seed, path=path)
        problem = _problem(replay, group, view, seed, path)
        if problem is not None:
            return problem
        assert group is not None
        try:
            for record in decode_records(view[group.start : group.end]):
                _apply(replay, record)
        except ValueError as error:
            what = f"invalid record in a group of the Raft log: {error}"
            raise _corrupt(what, path, replay.end) from error
        replay.group += 1
        replay.end = group.end
    return None


def _problem(replay: Replay, group: RecordGroup | None, view: memoryview, seed: int, path: str) -> str | None:
    if group is None:
        return "a group header that does not verify"
    if group.number != replay.group:
        # Its checksum shows that it belongs here, so groups before it are missing.
        what = "a group of the Raft log has the wrong number"
        raise _corrupt(what, path, replay.end, group.number, replay.group)
    if group.end > len(view):
        return f"a group up to {group.end} in a file of {len(view)} bytes"
    if not verify_records(view[group.start : group.end], group, seed):
        return "a group whose records do not verify"
    return None


def _find_group(data: bytearray, end: int, seed: int, path: str) -> int | None:
    """Offset of the first group after `end` whose header verifies."""
    at = end + 8
    while (at := data.find(GROUP_MAGIC, at)) >= 0:
        if at % 8 == 0 and group_at(data, at, seed, path=path):
            return at
        at += 1
    return None


def _check_may_be_cut(replay: Replay, problem: str, path: str, *, is_newest: bool, later: int | None) -> None:
    """Raise `rt.Corrupt` if something proves that the bad group at `replay.end` was synced."""
    if not is_newest:
        proof = "a later segment exists"
    elif later is not None:
        proof = f"a later group exists at {later}"
    else:
        return
    expected = f"group {replay.group}, which was synced: {proof}"
    raise _corrupt(_SYNCED_BUT_BAD, path, replay.end, problem, expected)


def _check_synced_end(replay: Replay, synced: SyncedEnd, path: str, problem: str | None) -> None:
    """Raise `rt.Corrupt` unless everything recorded as synced was replayed."""
    if synced.log != replay.header.log:
        what = "the recorded synced end belongs to another Raft log"
        raise _corrupt(what, path, 0, replay.header.log.hex(), synced.log.hex())
    if synced.segment > replay.header.number or synced.group >= replay.group:
        expected = f"groups up to {synced.group} in log.{synced.segment}, which were synced"
        got = problem or f"groups up to {replay.group - 1}"
        raise _corrupt(_SYNCED_BUT_BAD, path, replay.end, got, expected)


def _corrupt(what: str, path: str, offset: int, got: object = None, expected: object = None) -> Corrupt:
    return Corrupt(what, path=path, offset=offset, got=got, expected=expected, hint=WIPE_HINT)


def _apply(replay: Replay, record: LogRecord) -> None:
    """Apply the record. `ValueError` if it cannot follow the earlier ones."""
    entries, place = replay.entries, record.place
    if record.kind is RecordKind.ENTRY:
        last = entries.last
        if place.index != last.index + 1 or place.term < last.term:
            raise ValueError(f"entry {place} after {last}")
        entries.append(RaftEntry(record.content, *place))
    elif record.kind is RecordKind.TRUNCATE:
        if place.index < entries.base.index:
            # The record truncated entries of a segment that was compacted later.
            entries.reset(place)
        elif entries.term_at(place.index) == place.term:
            entries.truncate(place.index + 1)
        else:
            raise ValueError(f"truncation after {place} of a log from {entries.base} to {entries.last}")
    elif record.kind is RecordKind.TERM:
        vote = record.content.decode() or None
        if place.term < replay.term or (place.term == replay.term and replay.voted_for not in (None, vote)):
            raise ValueError(f"term {place.term} and vote {vote} after {replay.term} and {replay.voted_for}")
        replay.term, replay.voted_for = place.term, vote
    else:
        entries.reset(place)


def recover_log(
    disk: Disk, directory: str, create_at: LogIndex | None, new_id: Callable[[], bytes], fill_bytes: int
) -> tuple[Replay, SyncedEnd]:
    """Return the log of the directory, completely durable, and the recorded synced end.

    If there is no log, makes a new one after `create_at`; if `create_at` is None, raises `rt.LogNotFound`.
    Fills the newest segment up to `fill_bytes` if there is space. Raises `rt.Corrupt`, `rt.UnknownVersion`
    and `OSError`.
    """
    numbers = segment_numbers(disk, directory)
    synced = _read_synced_end(disk, directory)
    if not numbers:
        if synced is not None:
            path = os.path.join(directory, f"log.{synced.segment}")
            expected = f"groups up to {synced.group} (synced before)"
            raise _corrupt("the segments of the Raft log are missing", path, 0, "none", expected)
        numbers = [_create(disk, directory, create_at, new_id)]
    run = newest_run(numbers)
    replay = replay_segments(_read_segments(disk, directory, run), run[-1], synced)
    _remove_leftovers(disk, directory)
    _cut_and_sync(disk, directory, replay, synced, fill_bytes)
    return replay, _store_synced_end(disk, directory, replay, synced)


def segment_numbers(disk: Disk, directory: str) -> list[int]:
    """The numbers of the segments, sorted; empty if the directory does not exist."""
    try:
        names = disk.list_directory(directory)
    except FileNotFoundError:
        return []
    return sorted(number for name in names if (number := parse_segment_name(name)) is not None)


def _create(disk: Disk, directory: str, create_at: LogIndex | None, new_id: Callable[[], bytes]) -> int:
    if create_at is None:
        hint = f"A node that had a log has lost its vote. {WIPE_HINT}"
        raise LogNotFound("no Raft log", where=directory, hint=hint)
    disk.make_directory(directory)
    header = RaftSegmentHeader(1, new_id(), create_at, create_at.term, None, 1)
    write_whole(disk, os.path.join(directory, header.file_name), encode_segment_header(header))
    return header.number


def _read_segments(disk: Disk, directory: str, numbers: range) -> Iterator[tuple[int, str, bytearray]]:
    """Yields one segment at a time, so that only one is in memory."""
    for number in numbers:
        path = os.path.join(directory, f"log.{number}")
        yield number, path, _read(disk, path)


def _read(disk: Disk, path: str) -> bytearray:
    with closing(disk.open(path)) as file:
        data = bytearray(file.size())
        with memoryview(data) as view:
            count = file.pread_into(view, 0)
        del data[count:]
        return data


def _read_synced_end(disk: Disk, directory: str) -> SyncedEnd | None:
    path = os.path.join(directory, SYNCED_END_FILE)
    with naming_file(path):
        return None if disk.size(path) is None else newest_synced_end(bytes(_read(disk, path)))


def _remove_leftovers(disk: Disk, directory: str) -> None:
    for name in disk.list_directory(directory):
        if name.startswith(".log.") and name.endswith(".new"):
            disk.remove(os.path.join(directory, name))


def _cut_and_sync(
    disk: Disk, directory: str, replay: Replay, synced: SyncedEnd | None, fill_bytes: int
) -> None:
    """Cut the torn tail, fill the segment, and sync file and directory.

    Everything that is not known to be synced is written again first: after a failed sync the system considers
    the bytes clean, and another sync would do nothing.
    """
    path = os.path.join(directory, replay.header.file_name)
    with closing(disk.open(path, write=True)) as file:
        is_known = synced is not None and synced.segment == replay.header.number
        start = synced.offset if synced is not None and is_known else SEGMENT_HEADER_BYTES
        for at in range(start, replay.end, _COPY_BYTES):
            _write_at(file, file.pread(min(_COPY_BYTES, replay.end - at), at), at)
        _fill(file, path, replay.end, fill_bytes)
        file.sync()
    disk.sync_directory(directory)


def _fill(file: File, path: str, start: int, fill_bytes: int) -> None:
    """Write zeros from `start` to `fill_bytes`, or to the end of the file.

    If the disk is full, the file is truncated at `start`.
    """
    try:
        write_zeros(file, start, max(file.size(), fill_bytes))
    except OSError as error:
        if not isinstance(storage_error(error, path, "filling a segment"), DiskFull):
            raise
        file.truncate(start)


def _store_synced_end(disk: Disk, directory: str, replay: Replay, synced: SyncedEnd | None) -> SyncedEnd:
    """Record the synced end durably, so that later corruption below it is recognized."""
    path = os.path.join(directory, SYNCED_END_FILE)
    sequence = synced.sequence + 1 if synced else 1
    header = replay.header
    end = SyncedEnd(sequence, header.number, replay.end, replay.group - 1, header.log)
    record = encode_synced_end(end)
    if disk.size(path) != 2 * SYNCED_END_BYTES:
        content = bytearray(2 * SYNCED_END_BYTES)
        content[end.file_offset : end.file_offset + SYNCED_END_BYTES] = record
        write_whole(disk, path, bytes(content))
        return end
    with closing(disk.open(path, write=True)) as file:
        _write_at(file, record, end.file_offset)
        file.sync()
    return end


def _write_at(file: File, data: bytes, offset: int) -> None:
    if file.pwritev([data], offset) != len(data):
        raise OSError(errno.ENOSPC, "short write")
