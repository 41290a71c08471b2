"""A plan that ends at a boundary that this node thinned out, and is released before the next plan."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from data_process_bench import Lagging, Played, snapshot_of
from sequencer_core import merging

from replicator.receive.batch_boundaries import read_marks
from rt.log.disk import REAL
from rt.log.format.running_checksum import chain_of_segment
from rt.log.format.segment import SegmentId, encode_segment_header
from rt.log.scan.directory import read_header
from rt.v1 import sequencer_pb2 as pb
from sequencer.sessions import replica as replica_module
from sequencer.state.apply import apply
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import MergeRange


def test_merging_continues_behind_released_boundary_that_was_thinned_out(config, tmp_path, monkeypatch):
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
            thinned = len(whole) + 1 - len(replica._marks[segment])
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
