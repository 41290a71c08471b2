"""The state machine that Raft drives: its snapshots carry the state and all retained write plans."""

from __future__ import annotations

import random

import pytest
from batches import CLUSTER
from hypothesis import given, settings
from hypothesis import strategies as st
from sequencer_core import opening, piece

from rt.errors import FormatError, UnknownVersion
from rt.v1 import sequencer_pb2 as pb
from sequencer.control import state_machine as machine_module
from sequencer.control.state_machine import SequencerStateMachine
from sequencer.state import feature_level
from sequencer.state.apply_result import CommandRejected, RangesMerged
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import MergeInstruction, RaiseFeatureLevel
from sequencer.state.state_codec import encode_state
from sequencer.state.write_plan import decode_write_plan


class Bench(SequencerStateMachine):
    def __init__(self) -> None:
        self.heard: list[tuple[int, object]] = []
        self.restored = 0
        super().__init__(lambda index, _c, _d, outcome: self.heard.append((index, outcome)), self._count)
        self.restore(0, b"", CLUSTER)

    def _count(self) -> None:
        self.restored += 1

    def do(self, command: object) -> None:
        self.apply(self.index + 1, encode_command(command))  # type: ignore[arg-type]

    def merge(self, size: int = 64) -> None:
        """One batch more of session 1."""
        if not self.state.sessions:
            self.do(opening())
        consumed = self.state.sessions[1].consumed
        at, first = (consumed.end.offset, consumed.end.number) if consumed else (64, 0)
        range_ = piece(start=at, end=at + size, first=first, count=1)
        self.do(MergeInstruction(self.state.instruction + 1, self.state.sequenced_ns + 1, (range_,)))
        assert isinstance(self.heard[-1][1], RangesMerged)

    @property
    def instructions(self) -> list[int]:
        return [plan.instruction for plan in self.tail]


def contents(machine: SequencerStateMachine) -> list[bytes]:
    return [plan.content for plan in machine.tail]


def replica_of(machine: SequencerStateMachine) -> Bench:
    other = Bench()
    other.restore(machine.index, machine.snapshot()(), CLUSTER)
    return other


@given(st.integers(0, 1000), st.integers(0, 12), st.integers(0, 14))
@settings(max_examples=40, deadline=None)
def test_restored_state_machine_equals_original_and_applies_next_merge_identically(seed, merges, durable):
    machine, rng = Bench(), random.Random(seed)
    for _ in range(merges):
        machine.merge(8 * rng.randrange(1, 100))
    machine.prune_plans(durable)
    other = replica_of(machine)
    assert (other.index, contents(other)) == (machine.index, contents(machine))
    assert other.instructions == list(range(min(durable, merges) + 1, merges + 1))
    for one in (machine, other):
        one.merge()
    assert encode_state(other.state) == encode_state(machine.state)
    assert contents(other) == contents(machine)


def test_snapshot_is_unchanged_by_later_commands():
    machine = Bench()
    machine.merge()
    encode, before = machine.snapshot(), machine.snapshot()()
    machine.merge()
    machine.prune_plans(2)
    assert encode() == before


def test_plans_are_pruned_only_up_to_durable_instruction():
    machine = Bench()
    for _ in range(5):
        machine.merge()
    machine.prune_plans(3)
    machine.prune_plans(1)
    assert machine.instructions == [4, 5]
    assert decode_write_plan(machine.tail[0].content).instruction == 4


def test_plans_beyond_size_limit_are_pruned_even_if_node_never_merges(monkeypatch):
    monkeypatch.setattr(machine_module, "PLANS_BYTES_MAX", 10_000)
    machine = Bench()
    for _ in range(500):
        machine.merge(1000)
    assert machine.instructions[-1] == 500
    assert len(machine.tail) <= 12
    behind = machine.state.merged.total_bytes - machine.tail[0].total_bytes
    assert behind <= 10_000


def test_rejected_command_changes_nothing_and_is_reported():
    machine = Bench()
    machine.do(MergeInstruction(7, 1, (piece(),)))
    assert isinstance(machine.heard[-1][1], CommandRejected)
    assert (machine.index, machine.instructions) == (1, [])


@pytest.mark.parametrize("command", [pb.Command(version=99), pb.Command(version=1)], ids=["version", "kind"])
def test_command_of_unknown_version_or_kind_raises_unknown_version(command):
    machine = Bench()
    with pytest.raises(UnknownVersion):
        machine.apply(1, command.SerializeToString())
    assert machine.index == 0


def test_truncated_snapshot_raises_format_error():
    machine = Bench()
    machine.merge()
    data = machine.snapshot()()
    for cut in (1, 3, len(data) // 2, len(data) - 1):
        with pytest.raises(FormatError):
            Bench().restore(1, data[:cut], CLUSTER)


def test_restored_callback_runs_on_each_restore():
    machine = Bench()
    assert (machine.restored, replica_of(machine).restored) == (1, 2)


def test_newer_feature_level_raises_unknown_version_with_location_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(feature_level, "LATEST", 2)
    newer = Bench()
    newer.do(RaiseFeatureLevel(2))
    snapshot = newer.snapshot()()
    monkeypatch.setattr(feature_level, "LATEST", 1)
    older = SequencerStateMachine(lambda *_: None, lambda: None, "/var/lib/rt/raft")
    older.restore(0, b"", CLUSTER)
    before = older.digest()
    with pytest.raises(
        UnknownVersion, match=r"\(at command 1 of the Raft log in /var/lib/rt/raft\): got level 2"
    ):
        older.apply(1, encode_command(RaiseFeatureLevel(2)))
    with pytest.raises(UnknownVersion, match=r"\(at the newest snapshot in /var/lib/rt/raft\): got level 2"):
        older.restore(1, snapshot, CLUSTER)
    with pytest.raises(UnknownVersion):
        older.check(snapshot)
    older.check(b"")
    older.check(Bench().snapshot()())
    assert older.digest() == before
