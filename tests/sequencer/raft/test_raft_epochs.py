"""When a node leaves its epoch, for which one, and what that begins with."""

from __future__ import annotations

import pytest

from rt.errors import FormatError
from sequencer.raft.entries import Reset, decode_content, encode_reset
from sequencer.raft.epochs import LeftBehind, forced_epoch, forced_number, is_succeeded, next_epoch
from sequencer.raft.messages import COMMAND_BYTES_MAX, NO_ID, Claim, Entry, Place
from sequencer.raft.state import Ended, decode_state, encode_state, initial_state
from tests.support.raft_bench import CLUSTER, commands_entry, disk_id

FORCED = 1 << 16


def test_a_reset_ends_its_own_epoch_and_no_other() -> None:
    state = initial_state(CLUSTER, 3, {"n1": disk_id("n1"), "n2": disk_id("n2"), "n3": disk_id("n3")})
    assert state.apply(Entry(encode_reset(Reset(2, b"late")), 2, 1)) is None
    assert state.apply(Entry(encode_reset(Reset(4, b"early")), 3, 1)) is None
    state.apply(commands_entry(4, 1, b"a", b"b"))
    assert state.apply(Entry(encode_reset(Reset(3, b"now")), 5, 1)) == Ended(3, b"now")


def test_the_next_epoch_begins_with_the_whole_state_one_place_further() -> None:
    state = initial_state(CLUSTER, 1, {"n1": disk_id("n1"), "n2": disk_id("n2"), "n3": disk_id("n3")})
    state.apply(commands_entry(2, 1, b"a"))
    begun = next_epoch(state, b"digest")
    assert (begun.epoch, begun.applied, begun.index) == (2, Place(3, 1), state.index)
    assert (begun.disks, begun.proposers, begun.cluster) == (state.disks, state.proposers, CLUSTER)
    assert begun.chain != next_epoch(state, b"another").chain, "nodes whose states differ find out"
    assert decode_state(encode_state(begun))[0] == begun


def test_a_forced_epoch_names_its_disks_and_is_above_all_that_resets_can_come_to() -> None:
    state = initial_state(CLUSTER, 5, {"n1": disk_id("n1"), "n2": disk_id("n2"), "n3": disk_id("n3")})
    begun = forced_epoch(state, b"digest", {"n1": disk_id("n1"), "n2": disk_id("n2", 1)})
    assert begun.epoch == FORCED == forced_number(5)
    assert begun.disks == {
        "n1": Claim(disk_id("n1"), begun.applied),
        "n2": Claim(disk_id("n2", 1), begun.applied),
        "n3": Claim(NO_ID, begun.applied),
    }
    assert forced_number(FORCED + 7) == 2 * FORCED


@pytest.mark.parametrize(
    ("own", "other", "is_so"),
    [
        (1, 2, True),
        (1, 9, True),
        (2, 2, False),
        (2, 1, False),
        (1, FORCED, False),
        (FORCED, FORCED + 1, True),
    ],
)
def test_what_came_of_an_epoch_by_resets_alone(own: int, other: int, is_so: bool) -> None:
    assert is_succeeded(own, other) == is_so


@pytest.mark.parametrize(
    ("ahead", "leaderless_s", "is_bound", "asked"),
    [
        ({}, 99.0, True, None),
        ({"n2": 2}, 1.0, True, None),
        ({"n2": 2}, 11.0, True, "n2"),
        ({"n2": 2, "n3": 2}, 0.0, True, "n3"),
        ({"n2": 3, "n3": 2}, 0.0, True, "n2"),
        ({"n2": FORCED, "n3": FORCED}, 99.0, True, None),
        ({"n2": FORCED}, 99.0, False, "n2"),
        ({"n2": FORCED, "n3": FORCED}, 0.0, False, "n3"),
        ({"n2": FORCED, "n3": 2}, 99.0, True, "n3"),
    ],
)
def test_whom_a_node_asks_that_is_left_behind(
    ahead: dict[str, int], leaderless_s: float, is_bound: bool, asked: str | None
) -> None:
    left = LeftBehind(3, 10.0, ahead)
    assert left.whom_to_ask(1, leaderless_s, is_bound=is_bound) == asked


@pytest.mark.parametrize(
    "content",
    [
        encode_reset(Reset(1, b""))[:-1],
        encode_reset(Reset(1, b""))[:2] + b"x" * 14,
        encode_reset(Reset(1, b"")) + bytes(COMMAND_BYTES_MAX + 1),
        bytes([17, 2]) + bytes(14),
    ],
)
def test_a_reset_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        decode_content(content)


def test_a_reset_survives_its_bytes() -> None:
    for reset in (Reset(1, b""), Reset(2**32, bytes(COMMAND_BYTES_MAX))):
        assert decode_content(encode_reset(reset)) == reset
