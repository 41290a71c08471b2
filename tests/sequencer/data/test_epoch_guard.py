"""Check of data directories against forced epochs: data of another epoch is rejected or quarantined."""

from __future__ import annotations

from pathlib import Path

import pytest
from sequencer_core import must, new_state

from rt.errors import ClusterMismatch, Corrupt, StorageError
from rt.log.disk import REAL
from sequencer.data.epoch_guard import FILE, EpochGuard
from sequencer.state.apply import apply
from sequencer.state.apply_result import ClusterReset, DiskJoined
from sequencer.state.commands import JoinDisk, ResetCluster
from sequencer.state.state import SequencerState

DISK = b"D" * 16


class Node:
    """The directories of n2, with a copy and a merged log in them."""

    def __init__(self, root: Path, *, is_empty: bool = False) -> None:
        self.root, self.sessions, self.merged = root, root / "sessions", root / "merged"
        self.sessions.mkdir(parents=True)
        if not is_empty:
            self.fill()

    def fill(self) -> None:
        (self.sessions / "1").mkdir()
        self.merged.mkdir()
        (self.merged / "log.0.0").write_bytes(b"bytes")
        (self.merged / "segments").write_bytes(b"table")

    def check(self, state: SequencerState) -> None:
        EpochGuard("n2", DISK, str(self.sessions), str(self.merged)).check(state)


def forced(
    by: str = "n1", *, request: bytes = b"R" * 16, state: SequencerState | None = None
) -> SequencerState:
    state = new_state() if state is None else state
    must(ClusterReset, apply(state, ResetCluster(False, 1 << 16, 77, request, by)))
    return state


def joined() -> SequencerState:
    state = new_state()
    must(DiskJoined, apply(state, JoinDisk("n2", DISK)))
    return state


def test_epoch_check_passes_without_forced_reset(tmp_path: Path) -> None:
    Node(tmp_path).check(joined())


def test_epoch_check_on_forcing_node_passes_and_keeps_merged_log(tmp_path: Path) -> None:
    node, state = Node(tmp_path), forced("n2", state=joined())
    node.check(state)
    node.check(state)
    node.check(forced("n2", request=b"S" * 16, state=state))
    assert (node.merged / "log.0.0").exists()


def test_epoch_check_raises_cluster_mismatch_if_data_predates_forced_reset(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(ClusterMismatch, match="Empty the node's Raft and data directories"):
        node.check(forced(state=joined()))
    assert (node.merged / "log.0.0").exists(), "nothing is touched"


@pytest.mark.parametrize("later", [None, b"S" * 16])
def test_epoch_check_raises_cluster_mismatch_if_forced_epoch_differs(
    tmp_path: Path, later: bytes | None
) -> None:
    node = Node(tmp_path, is_empty=True)
    node.check(forced(state=joined()))
    node.fill()
    node.check(forced(state=joined()))
    with pytest.raises(ClusterMismatch):
        node.check(joined() if later is None else forced(request=later, state=joined()))


def test_epoch_check_quarantines_data_of_unjoined_disk_despite_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, state = Node(tmp_path), forced()
    rename = type(REAL).rename

    def crash(self: object, source: str, target: str) -> None:
        rename(self, source, target)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    for _ in range(2):  # At each of the steps.
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(REAL), "rename", crash)
            node.check(state)
    node.check(state)
    aside = tmp_path / f"before-{(b'R' * 16).hex()}"
    assert sorted(path.name for path in aside.iterdir()) == ["1", "merged"]
    assert sorted(path.name for path in node.sessions.iterdir()) == [FILE]
    node.fill()
    node.check(state)
    assert (node.merged / "log.0.0").exists()


@pytest.mark.parametrize("content", [b"", b"x" * 20, bytes(21)])
def test_malformed_forced_epoch_file_raises_corrupt(tmp_path: Path, content: bytes) -> None:
    node = Node(tmp_path)
    (node.sessions / FILE).write_bytes(content)
    with pytest.raises(Corrupt):
        node.check(new_state())


def test_missing_sessions_directory_raises_storage_error_with_its_name(tmp_path: Path) -> None:
    node = Node(tmp_path, is_empty=True)
    belonging = EpochGuard("n2", DISK, str(node.sessions), str(node.merged))
    node.sessions.rmdir()
    with pytest.raises(StorageError, match="sessions"):
        belonging.check(forced())
