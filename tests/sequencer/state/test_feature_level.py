"""The feature level: checks before raising it, its effect on the encoded state, and unknown levels."""

from __future__ import annotations

import pytest
from sequencer_core import new_state, refusal

from rt.errors import UnknownVersion
from rt.v1 import sequencer_pb2 as pb
from sequencer.state import feature_level
from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, FeatureLevelRaised
from sequencer.state.command_codec import decode_command, encode_command, raised_level
from sequencer.state.commands import DecideRequest, RaiseFeatureLevel, ReleaseHold, SubmitRequest
from sequencer.state.feature_level import (
    LATEST,
    PERMITS,
    FeatureLevelRefused,
    MemberLevel,
    check_known,
    check_raise,
    member_level,
    raise_notes,
)
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import check_version, decode_state, encode_state

NEXT = LATEST + 1


@pytest.fixture
def knows_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this program know one more level."""
    monkeypatch.setattr(feature_level, "LATEST", NEXT)
    monkeypatch.setitem(feature_level.PERMITS, NEXT, "something new")


def member(name: str, latest: int, *, version: str = "1.2.0", is_current: bool = True) -> MemberLevel:
    return MemberLevel(name, latest, version, is_current)


def test_feature_levels_are_consecutive_from_1() -> None:
    assert list(PERMITS) == list(range(1, LATEST + 1))


OLD = "does not know this feature level (at member n2): got rt {} at most, expected level 3. Install"
REFUSED = [
    (3, 3, [], "only be raised: got level 3, expected a level above 3"),
    (2, 3, [], "only be raised: got level 2, expected a level above 3"),
    (
        3,
        2,
        [member("n1", 3), member("n2", 2)],
        OLD.format("1.2.0 with level 2"),
    ),
    (
        3,
        2,
        [member("n2", 1, version=""), member("n1", 3)],
        OLD.format("of an older version with level 1"),
    ),
    (3, 2, [member("n1", 3), member("n2", 3, is_current=False)], "(at member n2): got no report"),
    (3, 1, [member("n1", 3), member("n2", 2)], "(at member n2)"),
]


@pytest.mark.parametrize(("level", "current", "members", "why"), REFUSED)
def test_refused_feature_level_error_states_reason(
    level: int, current: int, members: list[MemberLevel], why: str
) -> None:
    with pytest.raises(FeatureLevelRefused) as refused:
        check_raise(level, current, members)
    assert why in str(refused.value)


@pytest.mark.parametrize(("level", "current"), [(2, 1), (3, 1), (3, 2)])
def test_feature_level_known_to_all_members_is_allowed_even_if_it_skips_levels(
    level: int, current: int
) -> None:
    check_raise(level, current, [member("n1", 3), member("n2", 4)])


def test_member_without_reported_feature_level_has_level_1() -> None:
    assert member_level("n1", pb.Summary(), is_current=True) == MemberLevel("n1", 1, "", True)
    said = pb.Summary(feature_level_latest=3, rt_version="2.0")
    assert member_level("n1", said, is_current=False) == MemberLevel("n1", 3, "2.0", False)


@pytest.mark.usefixtures("knows_next")
@pytest.mark.parametrize(
    ("members", "is_told"),
    [
        ([], False),
        ([member("n1", NEXT), member("n2", NEXT)], True),
        ([member("n1", NEXT), member("n2", LATEST)], False),
        ([member("n1", NEXT), member("n2", NEXT, is_current=False)], False),
    ],
)
def test_raise_note_appears_only_if_all_members_know_higher_feature_level(
    members: list[MemberLevel], is_told: bool
) -> None:
    notes = list(raise_notes(LATEST, members))
    assert bool(notes) == is_told
    assert all("something new" in note and f"`rt features raise {NEXT}`" in note for note in notes)


# In the state


@pytest.mark.usefixtures("knows_next")
def test_raised_feature_level_changes_only_version_of_encoded_state() -> None:
    state = new_state()
    before = encode_state(state)
    assert before[:2] == bytes([8, 1])
    assert apply(state, RaiseFeatureLevel(NEXT)) == FeatureLevelRaised(NEXT)
    assert encode_state(state) == bytes([8, NEXT]) + before[2:]
    assert decode_state(encode_state(state)) == state
    check_version(encode_state(state)[:2])


@pytest.mark.usefixtures("knows_next")
def test_feature_level_never_decreases() -> None:
    state = new_state()
    apply(state, RaiseFeatureLevel(NEXT))
    for level in range(2, NEXT + 1):
        assert f"has feature level {NEXT}" in refusal(state, RaiseFeatureLevel(level)).why


def test_raise_to_unknown_feature_level_raises_unknown_version_without_state_change() -> None:
    state = new_state()
    with pytest.raises(UnknownVersion, match=f"got level {NEXT}, expected level {LATEST} at most. I"):
        apply(state, RaiseFeatureLevel(NEXT))
    assert state == new_state()


@pytest.mark.parametrize("level", [0, NEXT, 127, 128, 300, 2**32 - 1])
def test_state_with_unknown_feature_level_raises_unknown_version(level: int) -> None:
    data = pb.SequencerState(version=level).SerializeToString()
    for check in (decode_state, lambda data: check_version(data[:2])):
        with pytest.raises(UnknownVersion, match="does not know"):
            check(data)
    with pytest.raises(UnknownVersion):
        check_known(level)


# Requests of operators


def asked(state: SequencerState, level: int) -> None:
    apply(state, SubmitRequest(b"q" * 16, 100, RaiseFeatureLevel(level)))


@pytest.mark.usefixtures("knows_next")
def test_refused_raise_request_is_decided_without_changing_feature_level() -> None:
    state = new_state()
    asked(state, NEXT)
    assert apply(state, DecideRequest(b"q" * 16, 50, "not yet")) == CommandRejected("not yet")
    assert state.feature_level == 1
    apply(state, DecideRequest(b"q" * 16, 50))  # A decision of an earlier leader.
    assert state.feature_level == 1


@pytest.mark.usefixtures("knows_next")
def test_decided_raise_request_raises_feature_level() -> None:
    state = new_state()
    asked(state, NEXT)
    assert apply(state, DecideRequest(b"q" * 16, 50)) == FeatureLevelRaised(NEXT)


def test_decide_request_without_refusal_keeps_its_original_bytes() -> None:
    decided = DecideRequest(b"q" * 16, 50)
    assert encode_command(decided) == pb.Command(
        version=1, decide=pb.Decide(id=b"q" * 16, at_ns=50)
    ).SerializeToString(deterministic=True)
    refused = DecideRequest(b"q" * 16, 50, "not yet")
    assert decode_command(encode_command(refused)) == refused


def test_raise_command_with_unknown_feature_level_can_be_decoded() -> None:
    command = RaiseFeatureLevel(300)
    assert decode_command(encode_command(command)) == command
    assert raised_level(encode_command(command)) == 300
    assert raised_level(encode_command(ReleaseHold("reader"))) is None
    assert raised_level(b"") is None
