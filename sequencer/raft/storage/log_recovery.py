"""What the segment files of a Raft log say after a crash: the log they add up to, and where it is cut.

Pure: the caller reads the files and does the cutting. The law: bit rot is not a torn tail. A group is only
written after the one before it was synced, and a segment only after all before it was. So a bad group may be
cut only if nothing shows that it was synced: no group behind it whose header verifies, no later segment, no
recorded synced end above it. Pages of the bad group itself show nothing: a torn write may have left any.

Where a group must stand and only zeros follow, up to the end of the file, the segment ends cleanly: nothing
was written there, or nothing of it is left; whether that was synced, the synced end or the next segment's
header tells. Anything else among the zeros is a bad group, even if its first page is zero.

Opening a Raft log: its files are read, judged, cut and made durable.

Laws. Nothing is changed before all of it is judged, and nothing at all where something is damaged. When
`recover_log` returns, what it accepted is on the medium, whatever a failed sync left, and behind it there is
nothing but zeros.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rt.errors import Corrupt, DiskFull, LogNotFound
from rt.log.disk import Disk, File, storage_error, write_whole
from sequencer.raft.model.messages import LogIndex, RaftEntry
from sequencer.raft.storage.log_entries import Entries
from sequencer.raft.storage.log_format import (
    GROUP_MAGIC,
    REPAIR_HINT,
    SEGMENT_HEADER_BYTES,
    SYNCED_END_BYTES,
    SYNCED_END_FILE,
    Group,
    LogRecord,
    RaftSegmentHeader,
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

_ZEROS = bytes(1 << 16)


def newest_run(numbers: Iterable[int]) -> range:
    """The longest run of consecutive numbers that ends at the highest: the segments that count.

    Older ones are left over from a compaction, whose removals a power cut may undo in any order.
    """
    present = set(numbers)
    first = end = max(present)
    while first - 1 in present:
        first -= 1
    return range(first, end + 1)


@dataclass(slots=True)
class Replay:
    """The log that segments add up to, fed one after the other, in the order of their numbers."""

    header: RaftSegmentHeader
    """Of the segment fed last."""
    entries: Entries
    term: int
    voted_for: str | None
    group: int
    """The number of the next group."""
    bases: list[LogIndex]
    """What stands before the first entry of each segment, the first one's first."""
    end: int = SEGMENT_HEADER_BYTES
    """Behind the last whole group of the segment fed last."""
    torn_bytes: int = 0
    """What stands behind `end` and must be cut, up to the last byte that is not zero."""


def replay_segments(
    segments: Iterable[tuple[int, str, bytearray]], newest: int, synced: SyncedEnd | None
) -> Replay:
    """What segments (number, path, content), of consecutive numbers up to `newest`, add up to.

    `synced` is what the log recorded last as synced. `rt.Corrupt` for whatever is wrong and may not be cut.
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
    """A segment's header says what all before it added up to, else one of the two is not what was synced."""
    log, last = replay.header.log, replay.entries.last
    wanted = RaftSegmentHeader(header.number, log, last, replay.term, replay.voted_for, replay.group)
    if header != wanted:
        what = "a Raft log segment does not go on where the one before it ends"
        raise Corrupt(what, path=path, offset=0, got=header, expected=wanted, hint=REPAIR_HINT)
    replay.header = header
    replay.bases.append(header.base)


def _content_end(data: bytearray) -> int:
    """Behind the last byte that is not zero."""
    end = len(data)
    while data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    start = max(0, end - len(_ZEROS))
    return start + len(data[start:end].rstrip(b"\0"))


def _replay_groups(replay: Replay, view: memoryview, content_end: int, path: str) -> str | None:
    """Replay whole groups from the segment's start; what is wrong with the first that is not one.

    The zeros from `content_end` on are none, but a group may end with some of them.
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
            what = f"a group of the Raft log holds what cannot be: {error}"
            raise Corrupt(what, path=path, offset=replay.end, hint=REPAIR_HINT) from error
        replay.group += 1
        replay.end = group.end
    return None


def _problem(replay: Replay, group: Group | None, view: memoryview, seed: int, path: str) -> str | None:
    if group is None:
        return "a group header that does not verify"
    if group.number != replay.group:
        # It was written here, so what was here before it, or stood before it, is gone.
        what = "a group of the Raft log stands where another one must"
        numbers = {"got": group.number, "expected": replay.group}
        raise Corrupt(what, path=path, offset=replay.end, hint=REPAIR_HINT, **numbers)
    if group.end > len(view):
        return f"a group up to {group.end} in a file of {len(view)} bytes"
    if not verify_records(view[group.start : group.end], group, seed):
        return "a group whose records do not verify"
    return None


def _find_group(data: bytearray, end: int, seed: int, path: str) -> int | None:
    """Where the first group behind `end` stands whose header verifies."""
    places = (at for at in _occurrences(data, GROUP_MAGIC, end + 8) if at % 8 == 0)
    return next((at for at in places if group_at(data, at, seed, path=path)), None)


def _occurrences(data: bytearray, wanted: bytes, start: int) -> Iterator[int]:
    while (start := data.find(wanted, start)) >= 0:
        yield start
        start += 1


def _check_may_be_cut(replay: Replay, problem: str, path: str, *, is_newest: bool, later: int | None) -> None:
    """Raise `rt.Corrupt` if the bad group at `replay.end` was followed by what is written after its sync."""
    if not is_newest:
        proof = "a later segment was begun"
    elif later is not None:
        proof = f"a later group stands at {later}"
    else:
        return
    raise _synced_but_bad(replay, problem, path, f"group {replay.group}, which was synced: {proof}")


def _check_synced_end(replay: Replay, synced: SyncedEnd, path: str, problem: str | None) -> None:
    """Raise `rt.Corrupt` unless all that was recorded as synced has been replayed."""
    if synced.log != replay.header.log:
        what = "the recorded synced end is of another Raft log"
        ids = {"got": replay.header.log.hex(), "expected": synced.log.hex()}
        raise Corrupt(what, path=path, offset=0, hint=REPAIR_HINT, **ids)
    if synced.segment > replay.header.number or synced.group >= replay.group:
        wanted = f"groups up to {synced.group} in log.{synced.segment}, which were synced"
        raise _synced_but_bad(replay, problem or f"groups up to {replay.group - 1}", path, wanted)


def _synced_but_bad(replay: Replay, problem: str, path: str, wanted: str) -> Corrupt:
    what = "synced bytes of the Raft log are damaged"
    return Corrupt(what, path=path, offset=replay.end, got=problem, expected=wanted, hint=REPAIR_HINT)


def _apply(replay: Replay, record: LogRecord) -> None:
    """Do what the record says; `ValueError` if it cannot follow what came before."""
    entries, place = replay.entries, record.place
    if record.kind is RecordKind.ENTRY:
        last = entries.last
        if place.index != last.index + 1 or place.term < last.term:
            raise ValueError(f"entry {place} behind {last}")
        entries.append(RaftEntry(record.content, *place))
    elif record.kind is RecordKind.TRUNCATE:
        if place.index < entries.base.index:
            # It cut entries of a segment that was compacted away since.
            entries.reset(place)
        elif entries.term_at(place.index) == place.term:
            entries.truncate(place.index + 1)
        else:
            raise ValueError(f"a cut behind {place} of a log from {entries.base} to {entries.last}")
    elif record.kind is RecordKind.TERM:
        vote = record.content.decode() or None
        if place.term < replay.term or (place.term == replay.term and replay.voted_for not in (None, vote)):
            raise ValueError(f"term {place.term} and vote {vote} behind {replay.term} and {replay.voted_for}")
        replay.term, replay.voted_for = place.term, vote
    else:
        entries.reset(place)


_COPY_BYTES = 1 << 20


def recover_log(
    disk: Disk, directory: str, create_at: LogIndex | None, new_id: Callable[[], bytes], fill_bytes: int
) -> tuple[Replay, SyncedEnd]:
    """What the log of the directory adds up to, all of it durable now, and the synced end that says so.

    A new log begins behind `create_at` where there never was one, or `rt.LogNotFound`. The newest segment is
    filled up to `fill_bytes`, if there is room. `rt.Corrupt`, `rt.UnknownVersion`; `OSError` as the disk
    raises it.
    """
    numbers = segment_numbers(disk, directory)
    synced = _read_synced_end(disk, directory)
    if not numbers:
        if synced is not None:
            raise Corrupt(
                "the segments of the Raft log are missing",
                path=os.path.join(directory, f"log.{synced.segment}"),
                offset=0,
                got="none",
                expected=f"groups up to {synced.group} (synced before)",
                hint=REPAIR_HINT,
            )
        numbers = [_create(disk, directory, create_at, new_id)]
    run = newest_run(numbers)
    replay = replay_segments(_read_segments(disk, directory, run), run[-1], synced)
    _remove_leftovers(disk, directory)
    _cut_and_sync(disk, directory, replay, synced, fill_bytes)
    return replay, _store_synced_end(disk, directory, replay, synced)


def segment_numbers(disk: Disk, directory: str) -> list[int]:
    """The numbers of the segments in the directory, oldest first; none where there is no directory."""
    try:
        names = disk.list_directory(directory)
    except FileNotFoundError:
        return []
    return sorted(number for name in names if (number := parse_segment_name(name)) is not None)


def _create(disk: Disk, directory: str, create_at: LogIndex | None, new_id: Callable[[], bytes]) -> int:
    if create_at is None:
        hint = "A node that had a log has lost its vote: move its directory away and let the node rejoin."
        raise LogNotFound("no Raft log", where=directory, hint=hint)
    disk.make_directory(directory)
    header = RaftSegmentHeader(1, new_id(), create_at, create_at.term, None, 1)
    write_whole(disk, os.path.join(directory, header.file_name), encode_segment_header(header))
    return header.number


def _read_segments(disk: Disk, directory: str, numbers: range) -> Iterator[tuple[int, str, bytearray]]:
    """One after the other, so that only one is in memory."""
    for number in numbers:
        path = os.path.join(directory, f"log.{number}")
        yield number, path, _read(disk, path)


def _read(disk: Disk, path: str) -> bytearray:
    file = disk.open(path)
    try:
        data = bytearray(file.size())
        with memoryview(data) as view:
            count = file.pread_into(view, 0)
        del data[count:]
        return data
    finally:
        file.close()


def _read_synced_end(disk: Disk, directory: str) -> SyncedEnd | None:
    path = os.path.join(directory, SYNCED_END_FILE)
    return None if disk.size(path) is None else newest_synced_end(bytes(_read(disk, path)))


def _remove_leftovers(disk: Disk, directory: str) -> None:
    for name in disk.list_directory(directory):
        if name.startswith(".log.") and name.endswith(".new"):
            disk.remove(os.path.join(directory, name))


def _cut_and_sync(
    disk: Disk, directory: str, replay: Replay, synced: SyncedEnd | None, fill_bytes: int
) -> None:
    """Cut the torn tail, fill the segment, and make what recovery accepted durable, names too.

    What is not known to be synced is written again first, the zeros too: if a sync of it failed, the system
    holds the bytes for clean, and another sync would do nothing.
    """
    path = os.path.join(directory, replay.header.file_name)
    file = disk.open(path, write=True)
    try:
        is_known = synced is not None and synced.segment == replay.header.number
        start = synced.offset if synced is not None and is_known else SEGMENT_HEADER_BYTES
        for at in range(start, replay.end, _COPY_BYTES):
            data = file.pread(min(_COPY_BYTES, replay.end - at), at)
            if file.pwritev([data], at) != len(data):
                raise OSError(errno.ENOSPC, "short write")
        _fill(file, path, replay.end, fill_bytes)
        file.sync()
    finally:
        file.close()
    disk.sync_directory(directory)


def _fill(file: File, path: str, start: int, fill_bytes: int) -> None:
    """Write zeros from `start` over all that stands there, and on to `fill_bytes`.

    On a full disk the file ends at `start`, and will grow again.
    """
    try:
        write_zeros(file, start, max(file.size(), fill_bytes))
    except OSError as error:
        if not isinstance(storage_error(error, path, "filling a segment"), DiskFull):
            raise
        file.truncate(start)


def _store_synced_end(disk: Disk, directory: str, replay: Replay, synced: SyncedEnd | None) -> SyncedEnd:
    """Record what recovery made durable, durably: bit rot in it is known for what it is from now on."""
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
    file = disk.open(path, write=True)
    try:
        if file.pwritev([record], end.file_offset) != len(record):
            raise OSError(errno.ENOSPC, "short write")
        file.sync()
    finally:
        file.close()
    return end
