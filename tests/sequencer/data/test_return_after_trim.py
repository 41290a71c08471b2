"""Return of a node after the cluster trimmed bytes it has yet to merge: real files and a real peer.

No node has a copy of the sessions any more. So the missing bytes come from the peer's merged log.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from batches import CLUSTER
from disks import MemoryDisk
from nodes_bench import IDENTITY, MERGED, Story, begin, open_merger
from receiving_node import FakeNode, make_pki, tls_of, until
from sequencer_core import must

from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.write.writer import LogWriter
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import ClusterMember, NodeConfig
from sequencer.data.process import DataProcess
from sequencer.ipc.data_reports import MergeProgress
from sequencer.localcluster.loopback import free_port
from sequencer.merged import catch_up
from sequencer.state.apply import apply
from sequencer.state.apply_result import SegmentsTrimmed
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import TrimSegments
from sequencer.state.state_codec import encode_state
from sequencer.state.write_plan import encode_write_plan

BEFORE = SegmentId(0, 3)


def drawn() -> Story:
    """A story of six segments or so."""
    return Story.drawn(5, instructions=8, roll_bytes=700, rolled=(8,))


FILES = drawn().files()
TRIM = TrimSegments(
    next(one.first for one in drawn().state.segments if one.id == BEFORE), TrimReason.DISK, 77
)
assert max(FILES) > SegmentId(0, 4), FILES.keys()


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """The files of a node that has merged everything, and has trimmed as the cluster decided."""
    root = tmp_path / "peer"
    write_log(root / "merged", len(drawn().plans))
    writer = LogWriter.open(str(root / "merged"), IDENTITY, resume=True)
    writer.trim(BEFORE, TrimReason.DISK)
    writer.close()
    return root


def write_log(directory: Path, count: int) -> None:
    """Write a merged log as it is after the first `count` plans."""
    story, disk = drawn(), MemoryDisk()
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    begin(merger, story, story.plans[:count])
    merger.wait_written(count)
    merger.sync()
    merger.close()
    directory.mkdir(parents=True)
    for path in disk.paths():
        if path.startswith(f"{MERGED}/"):
            (directory / path.rsplit("/", 1)[1]).write_bytes(disk.read(path))


def config_of(root: Path, pki: Path, peer_port: int) -> NodeConfig:
    ports = [free_port() for _ in range(2)]
    members = {
        "n1": ClusterMember(*(f"127.0.0.1:{port}" for port in ports)),
        "n2": ClusterMember(f"localhost:{free_port()}", f"localhost:{peer_port}"),
        "n3": ClusterMember(*(f"127.0.0.1:{free_port()}" for _ in range(2))),
    }
    return NodeConfig(
        stream="s",
        name="n1",
        directory=str(root),
        members=members,
        ca=str(pki / "ca.crt"),
        cert=str(pki / "n1.crt"),
        key=str(pki / "n1.key"),
        listen="127.0.0.1",
        raft_port=ports[0],
        data_port=ports[1],
        rest_port=0,
        health_port=0,
    )


@pytest.mark.parametrize("told", ["by a snapshot", "by commands", "by plans and then a trim"])
@pytest.mark.parametrize("count", range(0, len(drawn().plans), 2))
def test_returning_node_continues_at_log_start_of_peer_and_applies_missed_trim(
    count: int, told: str, peer: Path, pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "RETRY_S", 0.05)
    monkeypatch.setattr(catch_up, "POLL_S", 0.01)
    story, port = drawn(), free_port()
    config = config_of(tmp_path / "node", pki, port)
    if count:
        write_log(Path(config.merged_directory), count)
    if told != "by plans and then a trim":
        must(SegmentsTrimmed, apply(story.state, TRIM))
    plans = [] if told == "by a snapshot" else [encode_write_plan(plan) for plan in story.plans[count:]]
    snapshot = pb.ControlSnapshot(index=1, state=encode_state(story.state), plans=plans)

    def is_as_far(reached: MergeProgress) -> bool:
        # The running checksum of copied bytes is unknown.
        return reached._replace(chain=0) == story.reached._replace(chain=0)

    async def play() -> None:
        node = FakeNode(peer, node="n2")
        node.cluster = CLUSTER
        async with node.serving(tls_of(pki, "n1"), port):
            data = DataProcess(config)
            data.link.send = lambda _: None  # type: ignore[method-assign]
            try:
                await data._on_message(pb.ToData(snapshot=snapshot))
                if told == "by plans and then a trim":
                    applied = pb.Applied(index=2, command=encode_command(TRIM))
                    await data._on_message(pb.ToData(applied=applied))
                data.tasks.keep(data.catch_up.run())
                merger = data.merger
                assert merger is not None
                await until(lambda: is_as_far(merger.written) or data.failure)
                await until(lambda: (not merger._output.to_trim() and merger._is_idle) or data.failure)
                assert data.failure is None
                assert is_as_far(merger.sync())
                assert (merger.gap, merger.missing, merger.position) == (None, None, story.state.position)
            finally:
                await data._close()

    asyncio.run(play())
    assert_as_the_cluster_has_it(Path(config.merged_directory))


@pytest.mark.parametrize("count", [1, 3])
def test_returning_node_continues_despite_corrupt_segment_trimmed_by_cluster(
    count: int, peer: Path, pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node could repair the segment any more. So the node continues without it, instead of waiting
    indefinitely.
    """
    monkeypatch.setattr(catch_up, "POLL_S", 0.01)
    story, port = drawn(), free_port()
    config = config_of(tmp_path / "node", pki, port)
    directory = Path(config.merged_directory)
    write_log(directory, count)
    newest = max(directory.glob("log.*"))
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)
    assert newest.name < BEFORE.file_name
    must(SegmentsTrimmed, apply(story.state, TRIM))
    snapshot = pb.ControlSnapshot(index=1, state=encode_state(story.state))

    async def play() -> None:
        node = FakeNode(peer, node="n2")
        node.cluster = CLUSTER
        async with node.serving(tls_of(pki, "n1"), port):
            data = DataProcess(config)
            data.link.send = lambda _: None  # type: ignore[method-assign]
            try:
                await data._on_message(pb.ToData(snapshot=snapshot))
                merger = data.merger
                assert merger is not None
                assert merger.damage is not None
                for work in (data.repair.repairer.run(), data.catch_up.run()):
                    data.tasks.keep(work)
                await until(lambda: merger.position == story.state.position or data.failure)
                await until(lambda: not data.repair.repairer.corrupt_files or data.failure)
                assert data.failure is None
                assert merger.damage is None
            finally:
                await data._close()

    asyncio.run(play())
    assert_as_the_cluster_has_it(directory)


def assert_as_the_cluster_has_it(directory: Path) -> None:
    """Check that kept segments have the cluster's bytes, and that all other segments are trimmed like in the
    cluster.
    """
    files = {path.name: path.read_bytes() for path in directory.glob("log.*")}
    kept = {segment.file_name: data for segment, data in FILES.items() if segment >= BEFORE}
    assert {name: data for name, data in files.items() if data} == kept
    writer = LogWriter.open(str(directory), IDENTITY, resume=True, disk=REAL)
    trimmed = [one for one in writer.table.segments if one.is_trimmed]
    writer.close()
    assert {one.id.file_name for one in trimmed} == files.keys() - kept.keys()
    assert {(one.reason, one.trimmed_ns) for one in trimmed} <= {(TrimReason.DISK, 77)}
