"""A data process whose control process is simulated by the test."""

from __future__ import annotations

import asyncio
from pathlib import Path

from log_items import files_of, give, items_of, publish, session_copy
from msgspec.structs import replace
from sequencer_core import do_merge, must, new_state

from replicator.receive.batch_boundaries import read_marks
from rt.log.disk import REAL
from rt.log.format.running_checksum import chain_of_segment
from rt.log.format.segment import SegmentId, encode_segment_header
from rt.log.scan.directory import read_header
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import ClusterMember, NodeConfig
from sequencer.data.process import DataProcess
from sequencer.localcluster.loopback import free_port
from sequencer.state.apply import apply
from sequencer.state.apply_result import RunOpened
from sequencer.state.commands import MergeRange
from sequencer.state.session_commands import OpenRun
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import encode_state
from sequencer.state.write_plan import WritePlan, encode_write_plan


def with_peers(config: NodeConfig) -> NodeConfig:
    """Add members at whose addresses no process listens."""
    peers = {name: ClusterMember(*(f"127.0.0.1:{free_port()}" for _ in range(2))) for name in ("n2", "n3")}
    return replace(config, members={**config.members, **peers})


def snapshot_of(state: SequencerState, index: int = 1, plans: tuple[bytes, ...] = ()) -> pb.ToData:
    snapshot = pb.ControlSnapshot(index=index, state=encode_state(state), plans=plans)
    return pb.ToData(snapshot=snapshot)


def is_echo(report: pb.DataReport) -> bool:
    return not report.segments and not report.HasField("merged") and not report.disk_bytes


class Played:
    """A data process whose control process is this object: it records the messages to control."""

    def __init__(self, config: NodeConfig) -> None:
        self.data = DataProcess(config)
        self.heard: list[pb.ToControl] = []
        self.data.link.send = self.heard.append  # type: ignore[method-assign]

    async def say(self, message: pb.ToData) -> None:
        await self.data._on_message(message)

    @property
    def merged(self) -> list[pb.MergedReport]:
        return [one.report.merged for one in self.heard if one.report.HasField("merged")]

    @property
    def finals(self) -> list[pb.SessionEnd]:
        reports = [one for said in self.heard for one in said.report.segments]
        return [one.final for one in reports if one.HasField("final")]

    @property
    def joins(self) -> list[int]:
        return [one.report.joins for one in self.heard if one.HasField("report") and is_echo(one.report)]

    async def until(self, is_so) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.001)

    async def __aenter__(self) -> Played:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.data._close()


class Lagging:
    """A session of several segments. This node's copy is complete, and the cluster merged it on other nodes.

    `unmerged`: how many of the last segments the cluster did not merge.
    """

    def __init__(self, config: NodeConfig, root: Path, *, unmerged: int = 0) -> None:
        path = self.publisher_path = publish(REAL, *[1500] * 12, root=str(root))
        self.copy_path = Path(config.sessions_directory) / "1"
        replica = session_copy(REAL, str(self.copy_path), path)
        give(replica, items_of(REAL, path))
        assert replica.next_offset is not None
        self.end, self.count, incarnation = replica.next_offset, replica.end, replica.identity.origin
        replica.close()
        header = read_header(REAL, path, SegmentId(0, 0))
        assert header is not None
        self.state = new_state()
        must(RunOpened, apply(self.state, OpenRun("feed", incarnation, None, 0, header.run_id)))
        self.plans: list[WritePlan] = []
        for roll in range(self.end.roll + 1 - unmerged):
            first = read_header(REAL, path, SegmentId(0, roll))
            marks = read_marks(REAL, path, SegmentId(0, roll))
            assert first is not None
            chain = chain_of_segment(encode_segment_header(first))
            last, number = marks[-1], first.first
            whole = MergeRange(1, 0, roll, 64, last.offset, number, last.number - number, chain, last.chain)
            self.plans.append(do_merge(self.state, whole))

    @property
    def segments(self) -> list[int]:
        """The roll numbers of the copy's segments that have bytes."""
        files = files_of(REAL, str(self.copy_path))
        return sorted(segment.roll for segment in files)

    def snapshot(self) -> pb.ToData:
        return snapshot_of(self.state, 20, tuple(map(encode_write_plan, self.plans)))
