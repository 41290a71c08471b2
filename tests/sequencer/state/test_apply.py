"""Applying commands to the replicated state: outcomes, rejections, and byte-exact write plans."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from batches import CLUSTER, Heard
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scripts import Case
from sequencer_core import (
    INCARNATIONS,
    DumbMerger,
    WrittenSession,
    do_merge,
    do_open,
    do_roll,
    end_of,
    merging,
    must,
    new_state,
    newest_of,
    opening,
    piece,
    random_runs,
    refusal,
    rolling,
)

from rt.log.format.block import BlockKind, decode_block_header
from rt.log.format.checksum import batch_seed, segment_seed
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from sequencer.state.apply import apply
from sequencer.state.apply_result import (
    CommandRejected,
    ConfigurationChanged,
    Outcome,
    RangesMerged,
    RunClosed,
    RunFenced,
    RunOpened,
)
from sequencer.state.commands import (
    COUNT_MAX,
    Command,
    Configure,
    HoldPosition,
    JoinDisk,
    MergeInstruction,
    MergeRange,
    ReleaseHold,
    RestoreDisk,
    TrimSegments,
)
from sequencer.state.configuration import Configuration
from sequencer.state.merge import resolve_range
from sequencer.state.session_commands import CloseRun, FenceRun, OpenRun
from sequencer.state.state import HOLDS_MAX, RUNS_MAX, End, MergedSegment, SequencerState
from sequencer.state.state_codec import decode_state, encode_state
from sequencer.state.write_plan import SessionEnd, WritePlan, decode_write_plan, encode_write_plan

# States that tests start with, and the commands of scripts


def merged(state: SequencerState) -> None:
    """Merge run 0 of session 1 up to offset 128, number 10."""
    do_open(state)
    do_merge(state, piece())


def dedup(state: SequencerState) -> None:
    """Open sessions 1 and 2 with the same dedup id. Its numbers up to 10 are merged from session 1."""
    do_open(state, "a", dedup="d")
    do_open(state, "b", dedup="d", incarnation=1)
    do_merge(state, piece())


WORDS: dict[str, Callable[..., Command]] = {
    "open": lambda state, name="a", newest=None, **more: opening(
        name, newest=newest_of(state, name) if newest is None else newest, **more
    ),
    "fence": lambda _, session_id, run: FenceRun(session_id, run),
    "close": lambda _, *numbers: CloseRun(*numbers),
    "roll": lambda state, *place, sequenced_ns=None, **more: replace(
        rolling(state, *place, **more), sequenced_ns=sequenced_ns or state.sequenced_ns + 1
    ),
    "join": lambda _, node, disk: JoinDisk(node, bytes([disk]) * 16),
    "restore": lambda _, node, disk: RestoreDisk(node, bytes([disk]) * 16),
    "trim": lambda _, up_to, reason: TrimSegments(up_to, TrimReason[reason], 1),
    "hold": lambda _, name, position: HoldPosition(name, position, 7),
    "release": lambda _, name: ReleaseHold(name),
}


def read_line(line: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the word, the values and the named values of a line, with numbers as numbers."""
    word, *rest = line.split()
    values = [int(one) if one.isdecimal() else one for one in rest if "=" not in one]
    named = dict(one.split("=") for one in rest if "=" in one)
    return word, values, {name: int(one) if one.isdecimal() else one for name, one in named.items()}


def command_of(state: SequencerState, line: str) -> Command:
    if not line.startswith("merge "):
        word, values, named = read_line(line)
        return WORDS[word](state, *values, **named)
    ranges, order = [], dict[str, int]()
    for part in line.removeprefix("merge ").split(" + "):
        _, values, named = read_line(f"range {part}")
        order |= {name: named.pop(name) for name in ("number", "sequenced_ns") if name in named}
        if "chains" in named:
            named["chains"] = tuple(map(int, named["chains"].split(",")))
        ranges.append(piece(*values, **named))
    return merging(state, *ranges, **order)


def told(outcome: Outcome) -> str:
    match outcome:
        case CommandRejected(why, is_fenced):
            return f"- {why}" + (" (for good)" if is_fenced else "")
        case RunOpened(session_id, run) | RunFenced(session_id, run):
            return f"{type(outcome).__name__} {session_id}, {run}"
        case RunClosed(session_id, run, end):
            return f"RunClosed {session_id}, {run} at {end.roll}.{end.offset}, number {end.number}"
        case RangesMerged(plan):
            return f"RangesMerged {plan.first_position}-{plan.end_position}"
        case _:
            return type(outcome).__name__


def shown(state: SequencerState, what: str) -> str:
    if what.isdecimal():
        session = state.sessions[int(what)]
        runs = [one.run for one in session.active_runs]
        done = None if session.done is None else (session.done[0], *session.done[1])
        return f"runs {runs}, done {done}, merged up to {end_of(session)}"
    disk = state.disks[what]
    return f"disk {disk.id[0]} of {what} joined {disk.joined}, is whole: {disk.is_whole}"


@pytest.mark.parametrize("name", ["instructions", "runs", "incarnations", "log_and_disks"])
def test_apply_outcomes_match_script(name: str, run_script: Callable[..., None]) -> None:
    def answer(case: Case) -> str:
        state, answers = new_state(), list[str]()
        for line in case.lines:
            if line.startswith("show "):
                answers.append(shown(state, line.removeprefix("show ")))
                continue
            *first, last = line.split("; ")
            for one in first:
                assert not isinstance(apply(state, command_of(state, one)), CommandRejected), one
            before, by_name = encode_state(state), dict(state.by_name)
            outcome = apply(state, command_of(state, last))
            if isinstance(outcome, CommandRejected):
                assert (encode_state(state), state.by_name) == (before, by_name), line
            answers.append(told(outcome))
        return "\n".join(answers)

    run_script(f"sequencer/apply/{name}.txt", answer)


@pytest.mark.parametrize(
    ("fill", "one_more", "why"),
    [
        (lambda n: opening(run=n), RUNS_MAX, "runs of the session wait"),
        (lambda n: HoldPosition(f"reader{n}", 0, 1), HOLDS_MAX, "is one more"),
    ],
    ids=["runs", "holds"],
)
def test_runs_and_holds_beyond_limit_are_rejected_without_state_change(
    fill: Callable[[int], Command], one_more: int, why: str
) -> None:
    state = new_state()
    for number in range(one_more):
        assert not isinstance(apply(state, fill(number)), CommandRejected)
    before = encode_state(state)
    assert why in refusal(state, fill(one_more)).why
    assert encode_state(state) == before


# Runs


def test_open_run_is_idempotent_for_its_session() -> None:
    state = new_state()
    assert apply(state, opening("a")) == RunOpened(1, 0)
    assert apply(state, opening("b", incarnation=1)) == RunOpened(2, 0)
    before = encode_state(state)
    assert apply(state, opening("a")) == RunOpened(1, 0)
    assert encode_state(state) == before
    assert state.by_name == {"a": 1, "b": 2}
    assert apply(state, opening("a", run=7)) == RunOpened(1, 7)
    assert [active.run for active in state.sessions[1].active_runs] == [0, 7]
    assert state.sessions[1].last_run == 7


def test_repeated_fence_and_configure_do_not_change_state() -> None:
    state = new_state()
    merged(state)
    for command, outcome in (
        (FenceRun(1, 0), RunFenced(1, 0)),
        (Configure(roll_bytes=4096), ConfigurationChanged()),
    ):
        assert apply(state, command) == outcome
        before = encode_state(state)
        assert apply(state, command) == outcome
        assert encode_state(state) == before


def test_configure_changes_only_named_settings() -> None:
    state = new_state()
    apply(state, Configure(roll_minutes=5))
    apply(state, Configure(session_bytes_max=1000))
    apply(state, Configure())
    assert state.configuration == replace(Configuration(), roll_minutes=5, session_bytes_max=1000)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["open", "fence", "close", "merge"])), max_size=40)
)
def test_incarnations_are_merged_and_closed_in_order(
    steps: list[tuple[int, str]],
) -> None:
    """The simple definition: an incarnation may be merged or closed only when all earlier ones of its name
    have ended.
    """
    state = new_state()
    for which, what in steps:
        session_id = which + 1
        before = [one.id for one in state.sessions.values() if one.id < session_id and one.active_runs]
        if what == "open":
            apply(state, opening(incarnation=len(state.sessions)))
        elif what == "fence":
            apply(state, FenceRun(session_id, 0))
        elif what == "close":
            assert not (isinstance(apply(state, CloseRun(session_id, 0, 0, 128, 10)), RunClosed) and before)
        else:
            assert not (isinstance(apply(state, merging(state, piece(session_id))), RangesMerged) and before)
        if len(state.sessions) == 7:
            break


# Dedup


def block_counts(order: WritePlan) -> list[tuple[int, int, int]]:
    """Return session id, skip and number of messages of the blocks with batches."""
    found = []
    at = order.offset or 64
    seed = segment_seed(CLUSTER, *order.segment)
    for block in order.blocks:
        header = decode_block_header(block.head, 0, batch_seed(seed, at))
        at += block.size_bytes
        if header.kind == BlockKind.BATCHES:
            assert header.message_count == block.message_count
            found.append((header.session_id, header.skip, header.message_count))
    return found


@pytest.mark.parametrize(
    ("first", "count", "blocks", "wanted"),
    [
        (0, 10, [], 10),
        (0, 5, [], 10),
        (5, 10, [(2, 5, 5)], 15),
        (9, 2, [(2, 1, 1)], 11),
        (10, 7, [(2, 0, 7)], 17),
    ],
    ids=["the same", "below", "straddling", "straddling by one", "above"],
)
def test_already_merged_dedup_numbers_are_skipped(
    first: int, count: int, blocks: list[tuple[int, int, int]], wanted: int
) -> None:
    state = new_state()
    dedup(state)
    order = do_merge(state, piece(2, first=first, count=count))
    assert block_counts(order) == blocks
    assert state.wanted == {"d": wanted}
    assert state.position == order.end_position == 10 + sum(block[2] for block in blocks)
    assert order.consumed == (SessionEnd(2, 0, 0, 128, first + count),)
    assert end_of(state.sessions[2]) == End(0, 128, first + count)


def test_two_sessions_of_one_dedup_id_merge_in_one_instruction() -> None:
    state = new_state()
    dedup(state)
    order = do_merge(state, piece(1, start=128, end=192, first=10, count=5), piece(2, first=5, count=20))
    assert block_counts(order) == [(1, 0, 5), (2, 10, 10)]
    assert state.wanted == {"d": 25}


def test_dedup_id_starts_at_first_merged_number() -> None:
    state = new_state()
    do_open(state, dedup="d")
    assert block_counts(do_merge(state, piece(first=1000))) == [(1, 0, 10)]
    assert state.wanted == {"d": 1010}


def test_block_can_skip_all_but_one_message_of_largest_range() -> None:
    """The skip of a block header has 32 bits."""
    state = new_state()
    do_open(state, "a", dedup="d")
    do_open(state, "b", dedup="d", incarnation=1)
    do_merge(state, piece(count=COUNT_MAX - 1))
    order = do_merge(state, piece(2, count=COUNT_MAX))
    assert block_counts(order) == [(2, COUNT_MAX - 1, 1)]
    with pytest.raises(ValueError):
        piece(count=COUNT_MAX + 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=20))
def test_each_dedup_number_is_merged_once_from_first_of_two_sessions(
    steps: list[tuple[bool, int]],
) -> None:
    state = new_state()
    dedup(state)
    ends = {1: End(0, 128, 10), 2: None}
    seen = list(range(10))
    for is_second, count in steps:
        session_id = 1 + is_second
        end = ends[session_id] or End(0, 64, 0)
        one = piece(session_id, end.offset, end.offset + 8, first=end.number, count=count)
        before = state.wanted["d"]
        outcome = apply(state, merging(state, one))
        fresh = [number for number in range(end.number, end.number + count) if number not in seen]
        assert fresh == list(range(before, before + len(fresh)))
        seen += fresh
        assert isinstance(outcome, RangesMerged)
        assert sum(block[2] for block in block_counts(outcome.plan)) == len(fresh)
        ends[session_id] = End(0, one.end, one.end_number)
    assert seen == list(range(state.wanted["d"]))
    assert state.position == len(seen)


def test_resolve_range_continues_from_given_session_without_changing_state() -> None:
    state = new_state()
    merged(state)
    ahead = resolve_range(state, piece(start=128, end=256, first=10), None)
    assert not isinstance(ahead, str)
    following = piece(start=256, end=512, first=20)
    assert isinstance(resolve_range(state, following, None), str)
    assert not isinstance(resolve_range(state, following, None, session=ahead.session), str)
    assert end_of(state.sessions[1]) == End(0, 128, 10)


# Segments


def filled(roll_bytes: int) -> tuple[SequencerState, WritePlan, WritePlan]:
    state = new_state()
    do_open(state)
    apply(state, Configure(roll_bytes=roll_bytes))
    first = do_merge(state, piece())
    return state, first, do_merge(state, piece(start=128, end=192, first=10))


def test_merged_segment_rolls_at_exactly_roll_bytes() -> None:
    size = filled(1 << 30)[1].end_offset
    state, first, second = filled(size)
    assert (first.segment, first.offset) == (SegmentId(0, 0), 0)
    assert (second.segment, second.offset, second.first_position) == (SegmentId(0, 1), 0, 10)
    assert [block.is_declaration for block in second.blocks] == [True, False]
    assert list(state.segments) == [
        MergedSegment(SegmentId(0, 0), 0, 10, size, first.sequenced_ns, second.sequenced_ns)
    ]
    assert second.total_bytes == size + second.end_offset
    assert state.merged.created_ns == second.sequenced_ns
    state, first, second = filled(size + 1)
    assert (second.segment, second.offset) == (SegmentId(0, 0), size)
    assert [block.is_declaration for block in second.blocks] == [False]
    assert not state.segments


def test_roll_seals_segment_at_once_and_next_one_receives_first_block_with_messages() -> None:
    state = new_state()
    dedup(state)
    first, position, chain = state.merged, state.position, state.merged.chain
    order = do_roll(state)
    assert (order.segment, order.offset, order.blocks, order.end_offset) == (SegmentId(0, 1), 0, (), 64)
    assert (order.first_position, order.end_position, order.chain) == (position, position, chain)
    assert decode_write_plan(encode_write_plan(order)) == order
    (sealed,) = state.segments
    assert (sealed.id, sealed.end, sealed.size_bytes) == (SegmentId(0, 0), position, first.offset)
    assert sealed.sealed_ns == state.merged.created_ns == state.sequenced_ns == order.sequenced_ns
    empty = do_merge(state, piece(2))
    assert (empty.segment, empty.blocks, empty.end_offset) == (SegmentId(0, 1), (), empty.offset)
    following = do_merge(state, piece(start=128, end=192, first=10))
    assert (following.segment, following.offset, following.blocks[0].is_declaration) == ((0, 1), 64, True)


def test_session_is_declared_once_per_segment() -> None:
    state = new_state()
    do_open(state, "a")
    do_open(state, "b", incarnation=1)
    order = do_merge(state, piece(1), piece(2))
    declared = [block.is_declaration for block in order.blocks]
    assert declared == [True, False, True, False]
    order = do_merge(state, piece(1, start=128, end=256, first=10), piece(2, start=128, end=256, first=10))
    assert [block.is_declaration for block in order.blocks] == [False, False]


def test_instruction_with_only_skipped_messages_starts_no_segment() -> None:
    """The first instruction of a stream may merge no message: then there is no segment yet."""
    state = new_state()
    do_open(state, dedup="d")
    state.wanted["d"] = 100
    order = do_merge(state, piece())
    assert (order.blocks, order.first_position, order.end_position, order.total_bytes) == ((), 0, 0, 0)
    assert state.merged.segment is None
    order = do_merge(state, piece(start=128, end=256, first=10, count=100))
    assert (order.segment, order.offset) == (SegmentId(0, 0), 0)
    assert block_counts(order) == [(1, 90, 10)]


# Bytes


class Sources:
    """Some sessions of real bytes, and how far each one was offered."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.written: dict[int, WrittenSession] = {}
        self.names: dict[int, str] = {}
        self.opened: list[OpenRun] = []
        self.queues: dict[int, list[Command | MergeRange]] = {}
        self.said: dict[tuple[int, int], bytes] = {}
        for session_id in range(1, rng.randint(2, 4)):
            self._write(session_id)

    def _write(self, session_id: int) -> None:
        rng = self.rng
        label = "twin" if rng.random() < 0.5 else f"s{session_id}"
        dedup = "twins" if label == "twin" else None
        name, incarnation = f"name-{session_id}", INCARNATIONS[session_id]
        session = self.written[session_id] = WrittenSession(incarnation)
        self.names[session_id] = name
        first = 0
        queue: list[Command | MergeRange] = self.queues.setdefault(session_id, [])
        active_runs = sorted(rng.sample(range(5), rng.randint(1, 3)))
        for run in active_runs:
            opening = OpenRun(name, incarnation, dedup, run, (run + 1).to_bytes(8, "little"))
            if run == active_runs[0]:
                self.opened.append(opening)
            else:
                queue.append(opening)
            for roll in range(rng.randint(1, 3)):
                numbers = range(first, first + rng.randint(1, 12))
                first = session.write(run, roll, first, random_runs(rng, numbers, label))
                queue += self._cut(session_id, run, roll)
                end = session.marks[run, roll][-1]
            queue += [FenceRun(session_id, run), CloseRun(session_id, run, roll, end.offset, end.number)]

    def _cut(self, session_id: int, run: int, roll: int) -> list[MergeRange]:
        session = self.written[session_id]
        last = len(session.marks[run, roll]) - 1
        cuts = sorted({0, last, *(self.rng.randint(0, last) for _ in range(self.rng.randint(0, 3)))})
        return [session.range_of(session_id, run, roll, a, b) for a, b in pairwise(cuts)]

    def next_command(self, state: SequencerState) -> Command | None:
        """Return the next command of some sessions. An instruction takes ranges of several sessions."""
        heads = {one: queue[0] for one, queue in self.queues.items() if queue}
        ranges = [head for head in heads.values() if isinstance(head, MergeRange)]
        others = [head for head in heads.values() if not isinstance(head, MergeRange)]
        if others and (not ranges or self.rng.random() < 0.7):
            command = self.rng.choice(others)
            self.queues[next(one for one, head in heads.items() if head is command)].pop(0)
            return command
        if not ranges:
            return None
        chosen = sorted(self.rng.sample(ranges, self.rng.randint(1, len(ranges))), key=lambda r: r.session_id)
        wanted = state.wanted.get("twins")
        kept = []
        for one in chosen:  # Twins start at 0, so one of them can always continue.
            if state.sessions[one.session_id].dedup_id is not None:
                wanted = one.first if wanted is None else wanted
                if one.first > wanted:
                    continue
                wanted = max(wanted, one.end_number)
            kept.append(one)
            self.queues[one.session_id].pop(0)
        return merging(state, *kept) if kept else rolling(state)

    def expected(self) -> dict[str, list[tuple[int, bytes]]]:
        """Return the messages that each session must produce if no session has a twin."""
        return {
            self.names[one]: [
                (int(said.value.split(b":")[1]), said.value)
                for runs in session.runs.values()
                for run in runs
                for said in run
            ]
            for one, session in self.written.items()
        }


def run_all(seed: int) -> tuple[SequencerState, DumbMerger, Sources]:
    rng = random.Random(seed)
    sources, merger = Sources(rng), DumbMerger()
    replicas = [new_state(), new_state()]
    configure = Configure(roll_bytes=rng.choice([1, 1000, 3000, 1 << 30]))
    commands: list[Command] = [*sources.opened, configure]
    while True:
        command = commands.pop(0) if commands else sources.next_command(replicas[0])
        if command is None:
            break
        outcomes = [apply(state, command) for state in replicas]
        assert outcomes[0] == outcomes[1]
        encoded = [encode_state(state) for state in replicas]
        assert encoded[0] == encoded[1]
        if rng.random() < 0.3:
            replicas[1] = decode_state(encoded[1])
            assert replicas[1] == replicas[0]
        if isinstance(command, MergeInstruction) or isinstance(outcomes[0], RangesMerged):
            order = must(RangesMerged, outcomes[0]).plan
            assert decode_write_plan(encode_write_plan(order)) == order
            merger.carry_out(order, sources.written)
        if merger.files and rng.random() < 0.1:
            outcome = apply_both(replicas, rolling(replicas[0]))
            if isinstance(outcome, RangesMerged):
                merger.carry_out(outcome.plan, sources.written)
    return replicas[0], merger, sources


def apply_both(replicas: list[SequencerState], command: Command) -> Outcome:
    outcomes = [apply(state, command) for state in replicas]
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_write_plans_produce_dense_merged_log_of_all_messages(seed: int) -> None:
    state, merger, sources = run_all(seed)
    heard = merger.read()
    assert [message.position for message in heard] == list(range(state.position))
    twins = [message for message in heard if message.said.value.startswith(b"twin:")]
    numbers = [message.number for message in twins]
    assert numbers == list(range(state.wanted.get("twins", 0)))
    for name, said in sources.expected().items():
        mine = [message for message in heard if message.session == name]
        own = [(message.number, message.said.value) for message in mine]
        if said[0][1].startswith(b"twin:"):
            assert own == [one for one in said if one in set(own)]
            assert {number for number, _ in said} <= set(numbers)
        else:
            assert own == said
    assert all(message.said.value.endswith(f":{message.number}".encode()) for message in heard)
    assert merger.chain == state.merged.chain
    assert_table(state, merger, heard)


def assert_table(state: SequencerState, merger: DumbMerger, heard: list[Heard]) -> None:
    """Check that the segment table agrees with the files."""
    sizes = {segment: len(data) for segment, data in merger.files.items() if any(data)}
    if state.merged.segment is None:
        assert not sizes
        return
    said = {one.id: one.size_bytes for one in state.segments} | {state.merged.segment: state.merged.offset}
    assert said == sizes
    assert state.merged.total_bytes == sum(sizes.values())
    places = [*((one.first, one.end) for one in state.segments), (state.merged.first, len(heard))]
    assert [end for _, end in places[:-1]] == [first for first, _ in places[1:]]
    assert places[0][0] == 0
