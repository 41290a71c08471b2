"""Files of a node that were changed or planted while it was down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos.wired_nodes import WiredNodes
from faults import Faults
from msgspec.structs import replace

from rt.log.disk import REAL
from rt.log.format.durable_end import DURABLE_FILE, encode_durable_end, record_place
from rt.log.scan.directory import read_durable_end, read_identity

pytestmark = pytest.mark.slow

CANARY = b"nobody writes here"


@pytest.mark.parametrize("at", [20, -1], ids=["header", "content"])
def test_bit_flip_in_raft_snapshot_ends_node_with_1_and_stream_flows_after_wipe(
    faults: Faults, at: int
) -> None:
    nodes, name = faults.nodes, follower(faults)
    with faults.sender(f"snapshot{at}") as sender:
        faults.wait_flow(sender)
        faults.wait(lambda: snapshots(nodes, name), "a snapshot")
        nodes.kill(name)
        (snapshot,) = snapshots(nodes, name)
        data = bytearray(snapshot.read_bytes())
        data[at] ^= 4
        snapshot.write_bytes(data)
        nodes.start(name)
        assert nodes.wait_ended(name) == 1
        assert any("event=process_failed" in line and str(snapshot) in line for line in faults.said(name))
        faults.wait_flow(sender)
        nodes.wipe(name)
        nodes.start(name)
        faults.wait_flow(sender)
        sender.close()
        faults.verdict(allowed=[r"process_failed|node_failed|snapshot"])


def test_symbolic_links_planted_at_write_paths_are_not_followed(faults: Faults, tmp_path: Path) -> None:
    nodes, name = faults.nodes, follower(faults)
    canary, elsewhere = tmp_path / "canary", tmp_path / "elsewhere"
    canary.write_bytes(CANARY)
    elsewhere.mkdir()
    with faults.sender("before-links") as sender:
        faults.wait_flow(sender)
        nodes.kill(name)
        home = nodes.directory(name)
        stream = home / nodes.stream
        copies = stream / "sessions"
        newest = max(int(path.name) for path in copies.glob("*/"))
        planted = [copies / str(number) for number in range(newest + 1, newest + 4)]
        for path in planted:
            path.symlink_to(elsewhere, target_is_directory=True)
        files = [
            *(stream / "merged" / each for each in (".segments.new", ".durable.new")),
            *(copies / str(newest) / each for each in (".segments.new", ".durable.new")),
            *(home / "raft" / f"snapshot.{index}.0.new" for index in range(5)),
        ]
        for path in files:
            path.unlink(missing_ok=True)  # The node may have been killed while it wrote this file.
            path.symlink_to(canary)
        nodes.start(name)
        with faults.sender("behind-links") as other:  # A link is planted at the path of its copy.
            faults.wait_flow(sender, other)
            faults.wait(
                lambda: any("is a symbolic link" in line for line in faults.said(name)), "a word of it"
            )
            position = max(map(nodes.merged_position, nodes.names))
            nodes.wait_merged(position, name)
            for path in planted:
                path.unlink()
            faults.wait_flow(sender, other)
            other.close()
        sender.close()
        faults.wait(lambda: (copies / str(newest + 1)).is_dir(), "a copy of its own")
        faults.verdict(allowed=["is a symbolic link"])
    assert canary.read_bytes() == CANARY
    assert os.listdir(elsewhere) == []


def test_session_replica_with_wrong_durable_end_is_quarantined_and_restored_from_peers(
    faults: Faults,
) -> None:
    """All segments verify, but the recorded durable end names messages that no segment contains."""
    nodes, name = faults.nodes, faults.nodes.names[0]  # The first node does not wait for another node's turn.
    with faults.sender("other-times") as sender:
        faults.wait_flow(sender)
        before = faults.restored
        nodes.kill(name)
        (replica,) = (
            path
            for path in (nodes.directory(name) / nodes.stream / "sessions").glob("*/")
            if read_identity(REAL, str(path)).name == sender.session
        )
        durable = read_durable_end(REAL, str(replica))
        assert durable is not None
        later = replace(durable, sequence=durable.sequence + 1, end=durable.end + 10**6)
        with (replica / DURABLE_FILE).open("r+b") as file:
            file.seek(record_place(later.sequence))
            file.write(encode_durable_end(later))
        nodes.start(name)
        faults.wait(
            lambda: any("replica was set aside" in line for line in faults.said(name)), "it to be set aside"
        )
        faults.wait(lambda: faults.restored > before, "its new disk to be whole")
        faults.wait_flow(sender)
        sender.close()
        faults.verdict(allowed=["synced segments are missing|segment_corrupt|replica was set aside"])


def follower(faults: Faults) -> str:
    """Return a follower of the three nodes. A part of a node may have failed before and run again."""
    faults.wait(faults.nodes.leader, "a leader")
    leader = faults.nodes.leader()
    return next(name for name in faults.nodes.names if name != leader)


def snapshots(nodes: WiredNodes, name: str) -> list[Path]:
    """Return the complete snapshots of a node's Raft: one, except during its replacement."""
    return [path for path in (nodes.directory(name) / "raft").glob("snapshot.*") if path.suffix != ".new"]
