"""Runs sent whole in one message: how they are joined, encoded, and stored in a session replica."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep
from hypothesis import given
from hypothesis import strategies as st
from log_items import COPY, SESSION, files_of, give, give_whole, items_of, publish, recut, session_copy
from msgspec.structs import replace

from replicator.protocol.codec import decode_push_request, encode_push_request
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    WHOLE_RUNS_MAX,
    Chunk,
    Item,
    LogOffset,
    Run,
    SegmentSealed,
    WholeRun,
    WholeRuns,
)
from replicator.push.whole_runs import joined
from rt.errors import ClusterMismatch, Corrupt, DiskFull, Fenced, ProtocolViolation, RtError
from rt.log.check.verify import verify
from rt.log.format.constants import NUMBER_MAX
from rt.log.whole_files import write_whole

RUNS = st.lists(st.lists(st.integers(0, 2000), max_size=4), min_size=1, max_size=8)


def offline(*runs: Iterable[int]) -> MemoryDisk:
    """A session directory with these runs. Each run is given by the sizes of its messages."""
    disk = MemoryDisk()
    for sizes in runs:
        publish(disk, *sizes)
    return disk


def flat(items: Iterable[Item | WholeRuns]) -> list[Item]:
    """The items as a flat list."""
    found: list[Item] = []
    for item in items:
        found += [one for run in item.runs for one in run.items] if isinstance(item, WholeRuns) else [item]
    return list(recut(found, iter(())))


def whole_of(disk: MemoryDisk) -> list[WholeRun]:
    return [
        run for item in joined(items_of(disk, SESSION)) if isinstance(item, WholeRuns) for run in item.runs
    ]


@given(runs=RUNS)
def test_joined_items_flatten_to_original_items(runs: list[list[int]]) -> None:
    items = items_of(offline(*runs), SESSION)
    assert flat(joined(items)) == items


def test_runs_before_last_are_joined_within_count_and_byte_limits() -> None:
    disk = offline(*[[10]] * (WHOLE_RUNS_MAX + 3))
    messages = list(joined(items_of(disk, SESSION)))
    assert [len(one.runs) for one in messages if isinstance(one, WholeRuns)] == [WHOLE_RUNS_MAX, 2]
    large = [
        item
        for x in range(4)
        for item in (
            Run(x, bytes(8)),
            Chunk(LogOffset(x, 0, 0), bytes(CHUNK_BYTES_MAX // 2 - 64 * (x == 3))),
            SegmentSealed(LogOffset(x, 0, CHUNK_BYTES_MAX // 2 - 64 * (x == 3)), 1, True, 5),
        )
    ]
    assert [len(one.runs) for one in joined(large) if isinstance(one, WholeRuns)] == [2, 2]


def test_run_of_several_segments_or_already_started_is_not_joined() -> None:
    disk = offline([3000, 3000], [10])
    items = items_of(disk, SESSION)
    assert list(joined(items)) == items
    begun = items_of(offline([10], [10]), SESSION)[1:]
    assert list(joined(begun)) == begun


def test_whole_runs_message_round_trips_and_invalid_one_raises_protocol_violation() -> None:
    runs = tuple(whole_of(offline([10], [], [20, 30], [5])))
    assert len(runs) == 3
    assert decode_push_request(encode_push_request(WholeRuns(runs))) == WholeRuns(runs)
    for bad in (
        (),
        runs[::-1],
        (runs[0], runs[0]),
        (replace(runs[0], data=bytes(56)),),
        (replace(runs[0], end=NUMBER_MAX),),
        (replace(runs[0], data=bytes(CHUNK_BYTES_MAX)), runs[1]),
        (replace(runs[0], run=Run(0, b"short")),),
        tuple(replace(runs[0], run=Run(x, bytes(8))) for x in range(WHOLE_RUNS_MAX + 1)),
    ):
        with pytest.raises(ProtocolViolation):
            decode_push_request(encode_push_request(WholeRuns(bad)))


@given(runs=RUNS, together=st.integers(1, 5))
def test_session_replica_of_whole_runs_equals_original_byte_for_byte(
    runs: list[list[int]], together: int
) -> None:
    disk = offline(*runs)
    receiver, plain = session_copy(disk), session_copy(disk, "/plain")
    give_whole(receiver, items_of(disk, SESSION), together)
    give(plain, items_of(disk, SESSION))
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    for one in (receiver, plain):
        point = one.sync_point()
        if point is not None:
            one.sync_to(point)
        one.on_synced(point)
    assert (receiver.next_offset, receiver.end, receiver.has_ended) == (
        plain.next_offset,
        plain.end,
        plain.has_ended,
    )
    assert receiver.durable == receiver.next_offset
    assert receiver.on_synced(None) == plain.on_synced(None)
    listed = [replace(one, sealed_ns=0) for one in receiver.writer.table.segments]
    assert listed == [replace(one, sealed_ns=0) for one in plain.writer.table.segments]
    receiver.close()
    plain.close()
    assert verify(COPY, disk=disk).damage == []


def test_whole_runs_are_accepted_only_directly_after_end_of_previous_run() -> None:
    disk = offline([10], [20], [30], [5])
    runs = whole_of(disk)
    receiver = session_copy(disk)
    run, chunk, sealed = runs[0].items
    give(receiver, [run, chunk])
    assert not receiver.may_append_whole(runs[1])
    give(receiver, [replace(sealed, is_last_of_run=False)])
    assert not receiver.may_append_whole(runs[1])
    give(receiver, [sealed])
    assert receiver.may_append_whole(runs[1])
    receiver.append_whole(runs[1:])
    assert not receiver.may_append_whole(runs[1])
    with pytest.raises(Fenced):
        receiver.append_whole(runs[:1])
    receiver.close()


def flipped(run: WholeRun, at: int) -> WholeRun:
    data = bytearray(run.data)
    data[at] ^= 1
    return replace(run, data=bytes(data))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        pytest.param(lambda run: flipped(run, -1), Corrupt, id="a value"),
        pytest.param(lambda run: flipped(run, 70), Corrupt, id="a batch header"),
        pytest.param(lambda run: flipped(run, 9), RtError, id="the segment header"),
        pytest.param(lambda run: replace(run, end=run.end + 1), ProtocolViolation, id="the end"),
        pytest.param(lambda run: replace(run, data=bytes(run.data)[:-8]), ProtocolViolation, id="cut short"),
        pytest.param(
            lambda run: replace(run, run=Run(run.run.number, b"another!")), ProtocolViolation, id="the life"
        ),
        pytest.param(lambda run: replace(run, run=Run(7, run.run.run_id)), ProtocolViolation, id="the X"),
    ],
)
def test_receiver_stores_none_of_whole_runs_if_one_is_invalid(bad, error: type[Exception]) -> None:
    disk = offline([10], [20], [30])
    first, second = whole_of(disk)
    receiver = session_copy(disk)
    with pytest.raises(error):
        receiver.append_whole([first, bad(second)])
    assert files_of(disk, COPY) == {}
    assert receiver.next_offset is None
    give_whole(receiver, items_of(disk, SESSION))
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    receiver.close()


def test_whole_runs_of_another_session_directory_raise_cluster_mismatch() -> None:
    disk, other = offline([10], [20]), offline([10], [20])
    receiver = session_copy(disk)
    with pytest.raises(ClusterMismatch):
        receiver.append_whole(whole_of(other))
    receiver.close()


def test_full_disk_stores_none_of_whole_runs_and_retry_succeeds_with_space() -> None:
    disk = offline([10], [20], [30], [5])
    runs = whole_of(disk)
    receiver = session_copy(disk)
    used, refused = disk.used_bytes, 0
    for room in range(0, 1 << 16, 64):
        disk.capacity_bytes = used + room
        try:
            receiver.append_whole(runs)
            break
        except DiskFull:
            refused += 1
            assert files_of(disk, COPY) == {}
            assert receiver.next_offset is None
    assert refused > 1
    assert [segment.run for segment in files_of(disk, COPY)] == [0, 1, 2]
    receiver.close()


@pytest.mark.slow
def test_power_cut_while_storing_whole_runs_keeps_prefix_and_copy_resumes() -> None:
    source = offline([10], [20], [], [300, 40], [5])
    whole = files_of(source, SESSION)
    items = items_of(source, SESSION)
    table = source.read(f"{SESSION}/segments")

    def prepare(disk: MemoryDisk) -> None:
        disk.make_directory(SESSION)
        write_whole(disk, f"{SESSION}/segments", table)

    def run(disk: MemoryDisk, log: Log) -> None:
        receiver = session_copy(disk)
        for item in joined(items):
            if isinstance(item, WholeRuns):
                receiver.append_whole(item.runs[:2])
                log.append(receiver.durable)
                receiver.append_whole(item.runs[2:])
                log.append(receiver.durable)
        receiver.close()

    def recover(disk: MemoryDisk, log: Log) -> None:
        session_copy(disk).close()

    def check(disk: MemoryDisk, log: Log) -> None:
        receiver = session_copy(disk)
        place = receiver.next_offset or LogOffset(0, 0, 0)
        assert place >= max((one for one in log if one is not None), default=LogOffset(0, 0, 0))
        kept = files_of(disk, COPY)
        assert kept == {segment: whole[segment] for segment in sorted(whole)[: len(kept)]}
        give_whole(receiver, items_of(source, SESSION, receiver.next_offset))
        assert files_of(disk, COPY) == whole
        receiver.close()
        assert verify(COPY, disk=disk).damage == []

    assert sweep(run, check, prepare=prepare, recover=recover, seeds=range(2)) > 50
