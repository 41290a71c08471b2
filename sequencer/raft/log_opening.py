"""Opening a Raft log: its files are read, judged, cut and made durable.

Laws. Nothing is changed before all of it is judged, and nothing at all where something is damaged. When
`recover_log` returns, what it accepted is on the medium, whatever a failed sync left, and behind it there is
nothing but zeros.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from rt.errors import Damaged, DiskFull, NotALog
from rt.log.disk import Disk, File, storage_error, write_whole
from sequencer.raft.log_recovery import Replay, newest_run, replay_segments
from sequencer.raft.log_spare import write_zeros
from sequencer.raft.messages import Place
from sequencer.raft.record import (
    REPAIR_HINT,
    SEGMENT_HEADER_BYTES,
    SYNCED_END_BYTES,
    SYNCED_END_FILE,
    SegmentHeader,
    SyncedEnd,
    encode_segment_header,
    encode_synced_end,
    newest_synced_end,
    parse_segment_name,
)

_COPY_BYTES = 1 << 20


def recover_log(
    disk: Disk, directory: str, create_at: Place | None, new_id: Callable[[], bytes], fill_bytes: int
) -> tuple[Replay, SyncedEnd]:
    """What the log of the directory adds up to, all of it durable now, and the synced end that says so.

    A new log begins behind `create_at` where there never was one, or `rt.NotALog`. The newest segment is
    filled up to `fill_bytes`, if there is room. `rt.Damaged`, `rt.UnknownVersion`; `OSError` as the disk
    raises it.
    """
    numbers = segment_numbers(disk, directory)
    synced = _read_synced_end(disk, directory)
    if not numbers:
        if synced is not None:
            raise Damaged(
                "the segments of the Raft log are gone",
                path=os.path.join(directory, f"log.{synced.segment}"),
                offset=0,
                got="none",
                wanted=f"groups up to {synced.group}, which were synced",
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


def _create(disk: Disk, directory: str, create_at: Place | None, new_id: Callable[[], bytes]) -> int:
    if create_at is None:
        hint = "A node that had one has lost its vote: take its directory away and let it join again."
        raise NotALog("no Raft log", where=directory, hint=hint)
    disk.make_directory(directory)
    header = SegmentHeader(1, new_id(), create_at, create_at.term, None, 1)
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
