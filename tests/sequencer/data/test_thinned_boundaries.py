"""Plans and ends of runs at boundaries that this node has thinned out."""

from __future__ import annotations

import asyncio
import errno
import os
from itertools import pairwise

import pytest
from data_process_bench import Lagging, Played, snapshot_of
from sequencer_core import do_close, do_fence, merging

from replicator.protocol.messages import LogOffset
from replicator.receive.batch_boundaries import read_marks
from rt.log.disk import REAL
from rt.log.format.running_checksum import chain_of_segment
from rt.log.format.segment import SegmentId, encode_segment_header
from rt.log.scan.directory import read_header
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.replication_tracker import unpack_boundaries
from sequencer.sessions import replica as replica_module
from sequencer.state.apply import apply
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import MergeRange
from sequencer.state.session_commands import CloseRun, FenceRun


def test_merging_continues_after_released_boundary_that_was_thinned_out(config, tmp_path, monkeypatch):
    """The leader may plan up to a boundary that this node does not keep, and input is released up to it."""
    lagging = Lagging(config, tmp_path / "publisher", unmerged=100)
    monkeypatch.setattr(replica_module, "MARKS_MAX", 4)
    path, thinned = str(lagging.copy_path), 0
    segment = SegmentId(0, 0)
    header = read_header(REAL, path, segment)
    whole = read_marks(REAL, path, segment)
    places = [(64, header.first, chain_of_segment(encode_segment_header(header)))]
    places += [(one.offset, one.number, one.chain) for one in whole]

    async def play() -> None:
        nonlocal thinned
        async with Played(config) as played:
            data, state = played.data, lagging.state
            await played.say(snapshot_of(state, 20))
            await data.replicas.open_replica(state.sessions[1])
            replica = data.replicas.get(1)
            thinned = len(whole) + 1 - replica._marks[segment].count
            index = 20
            for start, end in pairwise(places):
                count, chains = end[1] - start[1], (start[2], end[2])
                command = merging(state, MergeRange(1, 0, 0, start[0], end[0], start[1], count, *chains))
                index += 1
                await played.say(pb.ToData(applied=pb.Applied(index=index, command=encode_command(command))))
                apply(state, command)
                await played.until(lambda: data.merger.written.instruction == state.instruction)
                await data.merged_log.release_input(state.instruction)
            assert data.merger.position == places[-1][1]

    asyncio.run(play())
    assert thinned


@pytest.mark.parametrize("learned", ["applied", "snapshot of a new control process", "first snapshot"])
def test_node_with_later_bytes_of_closed_run_reports_boundary_at_its_end(
    config, tmp_path, monkeypatch, learned
):
    """Otherwise this node and one that ends there would never be found to hold the run up to its end."""
    lagging = Lagging(config, tmp_path / "publisher", unmerged=100)
    monkeypatch.setattr(replica_module, "MARKS_MAX", 4)
    segment = SegmentId(0, 0)
    end = read_marks(REAL, str(lagging.copy_path), segment)[0]
    state = lagging.state

    def close() -> list[bytes]:
        do_fence(state)
        do_close(state, 1, 0, (0, end.offset, end.number))
        return [encode_command(FenceRun(1, 0)), encode_command(CloseRun(1, 0, 0, end.offset, end.number))]

    async def play() -> None:
        async with Played(config) as played:

            def reported() -> list[tuple[int, int]]:
                reports = [one for said in played.heard for one in said.report.segments if not one.roll]
                marks = [mark for one in reports for mark in unpack_boundaries(one.boundaries)]
                return [(mark.number, mark.chain) for mark in marks if mark.offset == end.offset]

            if learned == "first snapshot":
                close()
            await played.say(snapshot_of(state, 20))
            if learned != "first snapshot":
                await played.data.replicas.open_replica(state.sessions[1])
                assert played.data.replicas.get(1).has_thinned(LogOffset(0, 0, end.offset))
                await played.until(lambda: any(said.report.segments for said in played.heard))
                assert not reported()
                for index, command in enumerate(close(), 21):
                    if learned == "applied":
                        await played.say(pb.ToData(applied=pb.Applied(index=index, command=command)))
            if learned == "snapshot of a new control process":
                await played.say(snapshot_of(state, 30))
            await played.until(reported)
            assert {*reported()} == {(end.number, end.chain)}

    asyncio.run(play())


def test_unreadable_boundary_at_end_of_closed_run_does_not_end_data_process(
    config, tmp_path, monkeypatch, caplog
):
    lagging = Lagging(config, tmp_path / "publisher", unmerged=100)
    monkeypatch.setattr(replica_module, "MARKS_MAX", 4)
    end = read_marks(REAL, str(lagging.copy_path), SegmentId(0, 0))[0]
    do_fence(lagging.state)
    do_close(lagging.state, 1, 0, (0, end.offset, end.number))

    def scans(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(replica_module, "scans", scans)

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(lagging.state, 20))
            await played.until(lambda: "task_failed" in caplog.text)
            assert "reading a session replica" in caplog.text
            assert played.data.failure is None

    asyncio.run(play())
