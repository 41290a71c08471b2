"""Epochs of the consensus: how they end, what the next one starts with, and which peers a node asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rt.cluster_epoch import (
    GENERATIONS_MAX,
    LINE_BITS,
    epoch_of,
    forced_number,
    generation_of,
    is_later,
    is_rival,
    is_succeeded,
    may_be_reset,
    name_of,
    number_of,
)
from rt.errors import FormatError
from sequencer.raft.model.cluster_state import EpochEnded, decode_state, encode_state, initial_state
from sequencer.raft.model.entry_codec import ResetEntry, decode_content, encode_reset
from sequencer.raft.model.epochs import EpochLeft, forced_epoch, next_epoch
from sequencer.raft.model.messages import COMMAND_BYTES_MAX, NO_ID, DiskClaim, LogIndex, RaftEntry
from sequencer.raft.transport.frames import NUMBER_MAX
from tests.support.raft_bench import CLUSTER, commands_entry, disk_id

FORCED = epoch_of(1 << 16, 5)
RIVAL = epoch_of(1 << 16, 6)
FORCED_AGAIN = epoch_of(2 << 16, 3)
LOT = bytes(range(16))
VOTERS = {"n1", "n2", "n3"}


def test_reset_entry_ends_only_its_own_epoch() -> None:
    state = initial_state(CLUSTER, 3, {"n1": disk_id("n1"), "n2": disk_id("n2"), "n3": disk_id("n3")})
    assert state.apply(RaftEntry(encode_reset(ResetEntry(2, b"late")), 2, 1)) is None
    assert state.apply(RaftEntry(encode_reset(ResetEntry(4, b"early")), 3, 1)) is None
    state.apply(commands_entry(4, 1, b"a", b"b"))
    assert state.apply(RaftEntry(encode_reset(ResetEntry(3, b"now")), 5, 1)) == EpochEnded(3, b"now")


def test_next_epoch_starts_with_whole_state_at_next_index() -> None:
    state = initial_state(CLUSTER, 1, {"n1": disk_id("n1"), "n2": disk_id("n2"), "n3": disk_id("n3")})
    state.apply(commands_entry(2, 1, b"a"))
    begun = next_epoch(state, b"digest")
    assert (begun.epoch, begun.applied, begun.index) == (2, LogIndex(3, 1), state.index)
    assert (begun.disks, begun.proposers, begun.cluster) == (state.disks, state.proposers, CLUSTER)
    assert begun.chain != next_epoch(state, b"another").chain, "nodes whose states differ find out"
    assert decode_state(encode_state(begun))[0] == begun


def test_forced_epoch_names_its_disks_and_starts_next_generation() -> None:
    state = initial_state(CLUSTER, 5, {"n1": disk_id("n1"), "n2": disk_id("n2"), "n3": disk_id("n3")})
    begun = forced_epoch(state, b"digest", {"n1": disk_id("n1"), "n2": disk_id("n2", 1)}, LOT)
    assert number_of(begun.epoch) == 1 << 16 == forced_number(5)
    assert begun.disks == {
        "n1": DiskClaim(disk_id("n1"), begun.applied),
        "n2": DiskClaim(disk_id("n2", 1), begun.applied),
        "n3": DiskClaim(NO_ID, begun.applied),
    }
    assert decode_state(encode_state(begun))[0] == begun
    assert forced_number((1 << 16) + 7) == 2 << 16


def test_epochs_forced_from_same_epoch_are_rivals_despite_equal_numbers() -> None:
    state = initial_state(CLUSTER, 5, {"n1": disk_id("n1"), "n2": disk_id("n2"), "n3": disk_id("n3")})
    one, other = (forced_epoch(state, b"digest", {}, bytes([at]) * 16) for at in (1, 2))
    assert number_of(one.epoch) == number_of(other.epoch)
    assert is_rival(one.epoch, other.epoch)
    for epoch in (other.epoch, next_epoch(other, b"digest").epoch):
        assert not is_later(one.epoch, epoch)
        assert not is_succeeded(one.epoch, epoch)
    assert name_of(one.epoch) != name_of(other.epoch)


def test_forced_epoch_starts_at_index_far_above_earlier_generations() -> None:
    state = initial_state(CLUSTER, 5, {"n1": disk_id("n1")})
    first = forced_epoch(state, b"", {}, LOT)
    assert first.applied.index > 2**53
    assert forced_epoch(first, b"", {}, LOT).applied.index > first.applied.index + 2**53
    last = forced_epoch(replace(state, epoch=epoch_of((GENERATIONS_MAX - 1) << 16, 1)), b"", {}, LOT)
    assert generation_of(last.epoch) == GENERATIONS_MAX
    assert max(last.applied.index, last.epoch) <= NUMBER_MAX


@given(number=st.integers(0, (GENERATIONS_MAX << 16) + 0xFFFF), line=st.integers(0, (1 << LINE_BITS) - 1))
def test_epoch_id_encodes_number_and_line(number: int, line: int) -> None:
    epoch = epoch_of(number, line)
    assert (number_of(epoch), generation_of(epoch)) == (number, number >> 16)
    assert 0 <= epoch <= NUMBER_MAX
    assert name_of(epoch) == (f"{number}-{line:010x}" if line else str(number))
    assert may_be_reset(epoch) == (number & 0xFFFF != 0xFFFF)


@pytest.mark.parametrize(
    ("own", "other", "is_so"),
    [
        (1, 2, True),
        (1, 9, True),
        (2, 2, False),
        (2, 1, False),
        (1, FORCED, False),
        (FORCED, FORCED + 1, True),
        (FORCED, RIVAL, False),
        (FORCED, RIVAL + 1, False),
        (FORCED, FORCED_AGAIN, False),
    ],
)
def test_epoch_is_succeeded_only_by_later_resets_of_its_line(own: int, other: int, is_so: bool) -> None:
    assert is_succeeded(own, other) == is_so


@pytest.mark.parametrize(
    ("elsewhere", "leaderless_s", "is_bound", "asked"),
    [
        ({}, 99.0, True, []),
        ({"n2": 2}, 1.0, True, []),
        ({"n2": 2}, 11.0, True, ["n2"]),
        ({"n2": 2, "n3": 2}, 0.0, True, ["n2", "n3"]),
        ({"n2": 2, "n3": 3}, 0.0, True, ["n3", "n2"]),
        ({"n2": FORCED, "n3": FORCED}, 99.0, True, []),
        ({"n2": FORCED}, 99.0, False, ["n2"]),
        ({"n2": FORCED, "n3": FORCED}, 0.0, False, ["n2", "n3"]),
        ({"n2": FORCED, "n3": 2}, 99.0, True, ["n3"]),
    ],
)
def test_node_in_earlier_epoch_asks_later_epoch_peers_if_majority_or_leaderless(
    elsewhere: dict[str, int], leaderless_s: float, is_bound: bool, asked: list[str]
) -> None:
    left = EpochLeft(VOTERS, 10.0, elsewhere)
    assert left.peers_to_ask(1, leaderless_s, is_bound=is_bound) == asked


def test_node_asks_no_peers_of_rival_epoch() -> None:
    left = EpochLeft(VOTERS, 10.0, {"n2": RIVAL, "n3": RIVAL + 1})
    assert left.peers_to_ask(FORCED, 99.0, is_bound=False) == []


@pytest.mark.parametrize(
    ("own", "elsewhere", "by"),
    [
        (1, {"n2": FORCED, "n3": FORCED + 1}, {"n2", "n3"}),
        (1, {"n2": FORCED}, set()),
        (1, {"n2": FORCED, "n3": RIVAL}, set()),
        (1, {"n2": FORCED, "n3": 2}, set()),
        (1, {"n2": 2, "n3": 3}, set()),
        (FORCED, {"n2": RIVAL, "n3": RIVAL}, {"n2", "n3"}),
        (FORCED, {"n2": FORCED_AGAIN, "n3": FORCED_AGAIN}, {"n2", "n3"}),
    ],
)
def test_forced_without_returns_members_only_if_majority_shares_one_forced_line(
    own: int, elsewhere: dict[str, int], by: set[str]
) -> None:
    assert set(EpochLeft(VOTERS, 10.0, elsewhere).forced_without(own)) == by


@pytest.mark.parametrize(
    "content",
    [
        encode_reset(ResetEntry(1, b""))[:-1],
        encode_reset(ResetEntry(1, b""))[:2] + b"x" * 14,
        encode_reset(ResetEntry(1, b"")) + bytes(COMMAND_BYTES_MAX + 1),
        bytes([17, 2]) + bytes(14),
    ],
)
def test_invalid_reset_entry_raises_format_error(content: bytes) -> None:
    with pytest.raises(FormatError):
        decode_content(content)


def test_reset_entry_survives_encode_and_decode() -> None:
    for reset in (ResetEntry(1, b""), ResetEntry(2**32, bytes(COMMAND_BYTES_MAX))):
        assert decode_content(encode_reset(reset)) == reset
