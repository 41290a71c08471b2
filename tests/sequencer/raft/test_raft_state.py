"""Raft entries, replicated state, proposals, follower progress and snapshot sending, against models.

Each optimized part runs beside its simple definition, over a network and a log that lose, repeat and reorder.
"""

from __future__ import annotations

import hashlib
import struct
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raft_bench import claim_of, disk_id, entries_of
from raft_members import proposals_of

from rt.errors import Closed, FormatError, MessageTooLarge, Overloaded, UnknownVersion
from sequencer.raft.core import progress, replication
from sequencer.raft.core.follower import AppendMatched, compare
from sequencer.raft.core.progress import FollowerProgress, Mode
from sequencer.raft.core.replication import SnapshotSender
from sequencer.raft.model.cluster_state import (
    INITIAL,
    ClusterState,
    PackApplied,
    ProposerState,
    decode_state,
    encode_state,
    initial_state,
)
from sequencer.raft.model.entry_codec import (
    NO_OP,
    PACK_BYTES,
    PACK_COMMANDS_MAX,
    PACKS_MAX,
    Commands,
    JoinEntry,
    NoOp,
    decode_content,
    decode_join,
    encode_commands,
    encode_join,
)
from sequencer.raft.model.messages import (
    COMMAND_BYTES_MAX,
    ENTRY_BYTES_MAX,
    NOWHERE,
    AppendEntries,
    DiskClaim,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    RaftEntry,
)
from sequencer.raft.proposals import RETRY_S_MAX, Proposals
from sequencer.raft.storage.log_entries import Entries
from sequencer.raft.storage.snapshots import SnapshotMeta

U64 = st.integers(0, 2**64 - 1)
ORDINAL = st.integers(1, 2**63 - 1)
DISK = st.binary(min_size=16, max_size=16)
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
COMMANDS = st.lists(st.binary(max_size=40), min_size=1, max_size=8)
MUTATION = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "drop"]), st.integers(0, 10_000), st.integers(0, 255)
)


def mutated(content: bytes, mutations: list[tuple[str, int, int]]) -> bytes:
    damaged = bytearray(content)
    for kind, at, value in mutations:
        at %= len(damaged) + 1
        match kind:
            case "flip" if at < len(damaged):
                damaged[at] ^= value or 1
            case "cut":
                del damaged[at:]
            case "insert":
                damaged.insert(at, value)
            case "drop":
                del damaged[at : at + 1 + value % 8]
    return bytes(damaged)


# --- What entries say ------------------------------------------------------------------------------------


@given(DISK, U64, ORDINAL, st.integers(0, PACKS_MAX - 1), COMMANDS)
def test_commands_entry_round_trips(
    disk: bytes, run: int, floor: int, open_packs: int, commands: list[bytes]
) -> None:
    sequence = floor + open_packs
    content = encode_commands(disk, run, sequence, floor, commands)
    assert decode_content(content) == Commands(disk, run, sequence, floor, tuple(commands))
    assert decode_join(content) is None


@given(NAME, DISK)
def test_join_entry_round_trips(name: str, disk: bytes) -> None:
    content = encode_join(JoinEntry(name, disk))
    assert decode_content(content) == decode_join(content) == JoinEntry(name, disk)


def test_noop_entry_decodes_as_noop() -> None:
    assert decode_content(NO_OP) == NoOp()
    assert decode_join(NO_OP) is None


@given(st.binary(max_size=200))
def test_entry_of_random_bytes_decodes_or_raises_format_error(content: bytes) -> None:
    try:
        decode_content(content)
    except FormatError:
        return


@given(COMMANDS, st.booleans(), st.lists(MUTATION, min_size=1, max_size=3))
def test_corrupt_entry_encodes_back_unchanged_or_raises_format_error(
    commands: list[bytes], is_join: bool, mutations: list[tuple[str, int, int]]
) -> None:
    """Decoded content uses all of its bytes: encoding it again returns the same bytes."""
    whole = (
        encode_join(JoinEntry("n1", disk_id("n1")))
        if is_join
        else encode_commands(disk_id("n1"), 1, 3, 2, commands)
    )
    damaged = mutated(whole, mutations)
    try:
        content = decode_content(damaged)
    except FormatError:
        return
    match content:
        case Commands():
            assert encode_commands(*content) == damaged
        case JoinEntry():
            assert encode_join(content) == damaged
        case NoOp():
            assert damaged == NO_OP


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", FormatError),
        (b"\x02\x80\x04.", FormatError),  # PySyncObj's own kinds: membership, pickled
        (b"\x01\x00", FormatError),
        (struct.pack("<BBHI16sQQQ", 0, 2, 0, 1, bytes(16), 1, 1, 1) + bytes(4), UnknownVersion),
        (struct.pack("<BBHI16sQQQ", 0, 1, 0, 0, bytes(16), 1, 1, 1), FormatError),  # no commands
        (struct.pack("<BBHI16sQQQ", 0, 1, 0, 2**32 - 1, bytes(16), 1, 1, 1), FormatError),
        (struct.pack("<BBHI16sQQQ", 0, 1, 0, 1, bytes(16), 1, 1, 2) + bytes(4), FormatError),  # floor above
        (struct.pack("<BBHI16sQQQ", 0, 1, 0, 1, bytes(16), 1, 0, 0) + bytes(4), FormatError),  # sequence 0
        (struct.pack("<BBHI16s", 16, 1, 2, 0, bytes(16)) + b"..", FormatError),  # no name
        (struct.pack("<BBHI16s", 16, 1, 3, 0, bytes(16)) + b"n1", FormatError),
    ],
)
def test_entry_with_invalid_header_or_length_is_rejected(content: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_content(content)


def test_entry_of_largest_command_fits_and_larger_one_raises_format_error() -> None:
    content = encode_commands(disk_id("n1"), 1, 1, 1, [bytes(COMMAND_BYTES_MAX)])
    assert len(content) <= ENTRY_BYTES_MAX
    assert isinstance(decode_content(content), Commands)
    with pytest.raises(FormatError):
        decode_content(encode_commands(disk_id("n1"), 1, 1, 1, [bytes(COMMAND_BYTES_MAX + 1)]))


# --- The state in a snapshot -----------------------------------------------------------------------------


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    disks = draw(st.dictionaries(NAME, st.builds(DiskClaim, DISK, st.builds(LogIndex, U64, U64)), max_size=4))
    firsts = st.dictionaries(U64, U64, max_size=4).map(lambda pairs: dict(sorted(pairs.items())))
    proposers = draw(st.dictionaries(DISK, st.builds(ProposerState, U64, U64, firsts), max_size=4))
    applied = LogIndex(draw(U64), draw(U64))
    chain = draw(st.integers(0, 2**32 - 1))
    return ClusterState(draw(DISK), draw(U64), disks, draw(U64), applied, chain, proposers)


@given(states(), st.binary(max_size=50))
def test_state_round_trips(state: ClusterState, machine: bytes) -> None:
    assert decode_state(encode_state(state) + machine) == (state, machine)


@given(states(), st.lists(MUTATION, min_size=1, max_size=3))
def test_corrupt_state_decodes_or_raises_format_error(
    state: ClusterState, mutations: list[tuple[str, int, int]]
) -> None:
    try:
        decode_state(mutated(encode_state(state), mutations))
    except FormatError:
        return


@given(st.binary(max_size=200))
def test_state_of_random_bytes_raises_format_error(content: bytes) -> None:
    with pytest.raises(FormatError):
        decode_state(content)


@given(states(), st.integers(0, 10_000))
def test_truncated_state_raises_format_error(state: ClusterState, at: int) -> None:
    content = encode_state(state)
    with pytest.raises(FormatError):
        decode_state(content[: at % len(content)])


def test_equal_states_encode_to_equal_bytes_in_any_dict_order() -> None:
    one = initial_state(bytes(16), 1, {"a": disk_id("a"), "b": disk_id("b")})
    two = initial_state(bytes(16), 1, {"b": disk_id("b"), "a": disk_id("a")})
    one.proposers = {disk_id("a"): ProposerState(1), disk_id("b"): ProposerState(2)}
    two.proposers = {disk_id("b"): ProposerState(2), disk_id("a"): ProposerState(1)}
    assert encode_state(one) == encode_state(two)


# --- What the log decides --------------------------------------------------------------------------------


@dataclass
class DumbState:
    """The simple definition, which remembers every applied pack and nothing else."""

    carried_out: list[Commands] = field(default_factory=list)
    runs: dict[bytes, int] = field(default_factory=dict)

    def apply(self, pack: Commands, members: set[bytes]) -> int | None:
        if pack.disk not in members or pack.run < self.runs.get(pack.disk, 0):
            return None
        self.runs[pack.disk] = pack.run
        done = [other for other in self.carried_out if (other.disk, other.run) == (pack.disk, pack.run)]
        if pack.sequence != len(done) + 1:
            return None
        first = sum(len(other.commands) for other in self.carried_out) + 1
        self.carried_out.append(pack)
        return first


PACK = st.tuples(st.sampled_from(["n1", "n2", "stranger"]), st.integers(1, 2), st.integers(1, 5))


@given(st.lists(PACK, max_size=40), st.integers(0, 40))
def test_packs_are_applied_once_in_order_of_their_proposer(
    packs: list[tuple[str, int, int]], restored_at: int
) -> None:
    """The entries of a pack may be committed several times, in any order and from any run; rule 4.

    Half-way the state is encoded as for a snapshot, and decoded again.
    """
    state = initial_state(bytes(16), 1, {name: disk_id(name) for name in ("n1", "n2")})
    members, dumb, outcomes = {disk_id("n1"), disk_id("n2")}, DumbState(), {}
    for at, (name, run, sequence) in enumerate(packs, 2):
        if at == restored_at:
            state, _ = decode_state(encode_state(state))
        commands = tuple(b"%s %d" % (name.encode(), sequence) for _ in range(sequence))
        pack = Commands(disk_id(name), run, sequence, 1, commands)
        applied = state.apply(RaftEntry(encode_commands(*pack), at, 1))
        wanted = dumb.apply(pack, members)
        assert applied == PackApplied(pack, wanted)
        if wanted is not None:
            outcomes[pack.disk, run, sequence] = wanted
        assert state.applied == LogIndex(at, 1)
    assert state.index == sum(len(pack.commands) for pack in dumb.carried_out)
    for (disk, run, sequence), first in outcomes.items():
        is_newest = dumb.runs[disk] == run
        assert state.first_index(disk, run, sequence) == (first if is_newest else None)


def test_pack_outcomes_below_floor_of_proposer_are_forgotten() -> None:
    """Otherwise a state would grow without bound."""
    state = initial_state(bytes(16), 1, {"n1": disk_id("n1")})
    for sequence in range(1, 101):
        floor = max(1, sequence - 3)
        state.apply(RaftEntry(encode_commands(disk_id("n1"), 1, sequence, floor, [b"x"]), sequence + 1, 1))
        assert state.first_index(disk_id("n1"), 1, sequence) == sequence
    assert list(state.proposers[disk_id("n1")].firsts) == [97, 98, 99, 100]


@pytest.mark.parametrize("index", [1, 3])
def test_repeated_or_skipped_entry_index_raises_assertion_error(index: int) -> None:
    state = initial_state(bytes(16), 1, {})
    with pytest.raises(AssertionError):
        state.apply(RaftEntry(NO_OP, index, 1))


CONTENT = st.one_of(
    st.just(NO_OP),
    st.builds(lambda name, disk: encode_join(JoinEntry(name, disk)), st.sampled_from(["n1", "n2"]), DISK),
    st.builds(lambda sequence: encode_commands(disk_id("n1"), 1, sequence, 1, [b"x"]), st.integers(1, 4)),
)


@given(st.lists(CONTENT, max_size=10), st.lists(CONTENT, max_size=10), st.integers(1, 3))
def test_running_checksums_are_equal_only_for_equal_histories(
    one: list[bytes], two: list[bytes], term: int
) -> None:
    def chain(contents: list[bytes]) -> tuple[ClusterState, int]:
        state = initial_state(bytes(16), 1, {"n1": disk_id("n1")})
        for index, content in enumerate(contents, 2):
            state.apply(RaftEntry(content, index, term))
        return state, state.chain

    (_, first), (_, second) = chain(one), chain(two)
    assert (first == second) == (one == two)


def test_newest_join_of_member_decides_its_disk() -> None:
    """If a join is repeated, its first index counts."""
    state = initial_state(bytes(16), 1, {"n1": disk_id("n1"), "n2": disk_id("n2")})
    assert state.disks["n2"] == claim_of("n2")
    joins = [
        ("n2", 1, LogIndex(2, 5)),
        ("n2", 1, LogIndex(2, 5)),
        ("n2", 2, LogIndex(4, 5)),
        ("n2", 0, LogIndex(5, 5)),
    ]
    for index, (name, generation, joined) in enumerate(joins, 2):
        state.apply(RaftEntry(encode_join(JoinEntry(name, disk_id(name, generation))), index, 5))
        assert state.disks[name] == claim_of(name, generation, joined)
    assert state.disks["n1"] == claim_of("n1")


def test_commands_of_replaced_disk_are_not_applied() -> None:
    """Commands that the disk sent before its loss may still be on their way."""
    state = initial_state(bytes(16), 1, {"n1": disk_id("n1")})
    state.apply(RaftEntry(encode_join(JoinEntry("n1", disk_id("n1", 1))), 2, 1))
    late = state.apply(RaftEntry(encode_commands(disk_id("n1"), 1, 1, 1, [b"late"]), 3, 1))
    assert late is not None
    assert late.first is None
    new = state.apply(RaftEntry(encode_commands(disk_id("n1", 1), 1, 1, 1, [b"new"]), 4, 1))
    assert new is not None
    assert new.first == 1


# --- Commands in flight ----------------------------------------------------------------------------------


ACTION = st.one_of(
    st.tuples(st.just("propose"), st.integers(1, 20)),
    st.tuples(st.just("take"), st.integers(0, 2)),
    st.tuples(st.just("commit"), st.integers(0, 30)),
    st.tuples(st.just("lose"), st.integers(0, 30)),
    st.tuples(st.just("repeat"), st.integers(0, 30)),
    st.tuples(st.just("restore"), st.integers(0, 5)),
)


@dataclass
class Proposing:
    """A node's proposals, with a log that takes them in any order or not at all."""

    proposals: Proposals = field(default_factory=lambda: proposals_of("n1"))
    state: ClusterState = field(default_factory=lambda: initial_state(bytes(16), 1, {"n1": disk_id("n1")}))
    under_way: list[bytes] = field(default_factory=list)
    futures: list[Future[int]] = field(default_factory=list)
    applied: list[bytes] = field(default_factory=list)
    now: float = 0.0

    def commit(self, content: bytes, *, is_told: bool = True) -> None:
        applied = self.state.apply(RaftEntry(content, self.state.applied.index + 1, 1))
        assert applied is not None
        if applied.first is not None:
            assert applied.first == len(self.applied) + 1
            self.applied += applied.pack.commands
        if is_told:
            self.proposals.on_applied(applied, self.state, self.now)

    def act(self, action: str, number: int) -> None:
        match action:
            case "propose":
                for _ in range(number):
                    self.futures.append(self.proposals.add(b"%d" % len(self.futures)))
            case "take":
                self.now += 0.6
                self.under_way += self.proposals.next_entries(number, self.now)
            case "restore":  # A snapshot covers commits that the node has not seen.
                for _ in range(min(number, len(self.under_way))):
                    self.commit(self.under_way.pop(0), is_told=False)
                self.proposals.on_restored(self.state, self.now)
            case _ if self.under_way:
                at = number % len(self.under_way)
                if action == "commit":
                    self.commit(self.under_way.pop(at))
                elif action == "repeat":
                    self.under_way.append(self.under_way[at])
                else:
                    del self.under_way[at]


@given(st.lists(ACTION, max_size=40))
def test_commands_are_applied_once_in_order_and_futures_return_their_index(
    actions: list[tuple[str, int]],
) -> None:
    """Section 8 of the Raft paper: entries are lost, repeated, reordered, or committed without the node's
    knowledge.
    """
    node = Proposing()
    for action, number in actions:
        node.act(action, number)
        assert node.applied == [b"%d" % at for at in range(len(node.applied))]
        for at, future in enumerate(node.futures):
            assert not future.done() or future.result(0) == at + 1
        assert node.proposals.in_flight == sum(not future.done() for future in node.futures)
    for _ in range(len(node.futures) + 3):
        node.now += 2 * RETRY_S_MAX
        node.act("take", 0)
        while node.under_way:
            node.commit(node.under_way.pop(0))
    assert [future.result(0) for future in node.futures] == list(range(1, len(node.futures) + 1))
    assert node.proposals.in_flight == 0


@given(
    st.lists(st.one_of(st.integers(0, 100), st.sampled_from([PACK_BYTES, COMMAND_BYTES_MAX])), max_size=30)
)
def test_packs_keep_within_entry_size_and_command_limits(sizes: list[int]) -> None:
    waiting = proposals_of("n1")
    for size in sizes:
        waiting.add(bytes(size))
    contents = waiting.next_entries("leader", 0.0)
    packs = [decode_content(content) for content in contents]
    assert len(packs) <= PACKS_MAX
    assert all(len(content) <= ENTRY_BYTES_MAX for content in contents)
    for number, pack in enumerate(packs, 1):
        assert isinstance(pack, Commands)
        assert (pack.sequence, pack.floor) == (number, 1)
        assert len(pack.commands) <= PACK_COMMANDS_MAX
        assert len(pack.commands) == 1 or sum(map(len, pack.commands)) <= PACK_BYTES
    taken = [len(command) for pack in packs for command in pack.commands]
    assert taken == sizes[: len(taken)]


def test_packs_are_proposed_again_after_leader_change_or_timeout() -> None:
    waiting = proposals_of("n1")
    waiting.add(b"x")
    [content] = waiting.next_entries(("term", 1), 0.0)
    assert waiting.next_entries(("term", 1), 0.9) == []
    assert waiting.next_entries(("term", 2), 0.95) == [content]
    assert waiting.next_entries(("term", 2), 1.5) == []
    assert waiting.next_entries(("term", 2), 2.0) == [content]


def test_proposals_raise_overloaded_above_command_or_byte_limit_until_applied() -> None:
    waiting = proposals_of("n1", commands_max=2, command_bytes_max=10)
    waiting.add(b"12345")
    with pytest.raises(Overloaded, match="too many commands in flight"):
        waiting.add(b"123456")
    waiting.add(b"1")
    with pytest.raises(Overloaded):
        waiting.add(b"")
    node = Proposing(waiting)
    node.act("take", 0)
    while node.under_way:
        node.commit(node.under_way.pop(0))
    assert waiting.in_flight == 0
    waiting.add(b"1234567890")
    with pytest.raises(MessageTooLarge):
        waiting.add(bytes(COMMAND_BYTES_MAX + 1))


def test_proposals_are_never_due_with_nothing_in_flight() -> None:
    waiting = proposals_of("n1")
    assert waiting.due() == float("inf")
    waiting.add(b"x")
    assert waiting.due() == 0.0
    waiting.next_entries("leader", 5.0)
    assert waiting.due() == 6.0


def test_closed_proposals_fail_pending_futures_and_reject_commands() -> None:
    waiting = proposals_of("n1")
    futures = [waiting.add(b"taken")]
    waiting.next_entries("leader", 0.0)
    futures += [waiting.add(b"waiting"), waiting.add(b"given up")]
    assert futures[2].cancel()
    reason = Closed("the end")
    waiting.close(reason)
    waiting.close(Closed("again"))
    for future in futures[:2]:
        error = future.exception(0)
        assert isinstance(error, Closed)
        assert error.__cause__ is reason
    with pytest.raises(Closed):
        waiting.add(b"late")


# --- What a follower is sent next ------------------------------------------------------------------------


@dataclass
class Replicating:
    """A leader with one follower that compares and writes, over a network that may lose, repeat and
    reorder.
    """

    leader: Entries
    follower: Entries
    progress: FollowerProgress
    requests: list[tuple[LogIndex, tuple[RaftEntry, ...]]] = field(default_factory=list)
    replies: list[tuple[bool, int, int]] = field(default_factory=list)

    def pump(self, *, is_heartbeat: bool) -> None:
        """Send as a leader does, with two entries a message."""
        has_sent = False
        while self.progress.next <= self.leader.last.index and not self.progress.is_full:
            entries = tuple(self.leader.entries(self.progress.next))[:2]
            self.send(entries)
            self.progress.on_sent(entries[-1].index, sum(len(entry.content) for entry in entries))
            has_sent = True
        if is_heartbeat and not has_sent:
            self.send(())

    def send(self, entries: tuple[RaftEntry, ...]) -> None:
        before = self.progress.next - 1
        self.requests.append((LogIndex(before, self.leader.term_at(before) or 0), entries))

    def arrive(self, at: int) -> None:
        prev, entries = self.requests.pop(at)
        verdict = compare(AppendEntries(9, prev, 0, 0, 0, entries), self.follower, 1)
        if not isinstance(verdict, AppendMatched):
            self.replies.append((False, prev.index, verdict.hint))
            return
        if verdict.cut is not None:
            self.follower.truncate(verdict.cut)
        for entry in verdict.new:
            self.follower.append(entry)
        self.replies.append((True, prev.index, verdict.matched))

    def answer(self, at: int) -> None:
        matched, prev, index = self.replies.pop(at)
        if matched:
            self.progress.on_matched(min(index, self.leader.last.index))
        else:
            self.progress.on_refused(prev, index)
        self.pump(is_heartbeat=False)

    def check(self, before: int) -> None:
        progress = self.progress
        assert progress.match >= before
        assert progress.match < progress.next <= self.leader.last.index + 1
        for index in range(1, progress.match + 1):
            assert self.follower.term_at(index) == self.leader.term_at(index)
        assert progress.in_flight_bytes == sum(size for _, size in progress.in_flight)

    def act(self, action: str, number: int) -> None:
        before = self.progress.match
        queue: list[object] = self.requests if number % 2 else self.replies  # type: ignore[assignment]
        match action:
            case "add":
                self.leader.append(entries_of([8], self.leader.last.index + 1)[0])
                self.pump(is_heartbeat=False)
            case "heartbeat":
                self.pump(is_heartbeat=True)
            case "arrive" if self.requests:
                self.arrive(number % len(self.requests))
            case "answer" if self.replies:
                self.answer(number % len(self.replies))
            case "lose" if queue:
                del queue[number % len(queue)]
            case "repeat" if queue:
                queue.append(queue[number % len(queue)])
        self.check(before)


def tails(*choices: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(choices), max_size=6).map(sorted)


STEP = st.tuples(
    st.sampled_from(["add", "heartbeat", "arrive", "arrive", "answer", "answer", "lose", "repeat"]),
    st.integers(0, 100),
)


@settings(max_examples=100)
@given(tails(2, 3), tails(4, 6), tails(5, 7), st.lists(STEP, max_size=40))
def test_follower_progress_reaches_leader_log_end_over_unreliable_network(
    common: list[int], own: list[int], leads: list[int], steps: list[tuple[str, int]]
) -> None:
    """Section 5.3 of the Raft paper, over a network that loses, repeats and reorders."""
    leader, follower = (Entries(INITIAL, entries_of(common + tail)) for tail in (leads, own))
    pair = Replicating(leader, follower, FollowerProgress(leader.last.index + 1))
    for action, number in steps:
        pair.act(action, number)
    for _ in range(3 * len(common + own + leads) + len(steps) + 10):
        pair.act("heartbeat", 0)
        while pair.requests or pair.replies:
            pair.act("arrive", 0)
            pair.act("answer", 0)
    assert pair.progress.match == leader.last.index
    agreed = follower.entries(2, leader.last.index + 1)  # A longer tail stays until it conflicts.
    assert [entry.place for entry in agreed] == [entry.place for entry in leader.entries(2)]
    assert (pair.progress.mode, pair.progress.in_flight_bytes) == (Mode.REPLICATE, 0)


def test_follower_progress_bounds_bytes_and_messages_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "IN_FLIGHT_BYTES_MAX", 100)
    following = FollowerProgress(2)
    following.on_matched(1)
    sent = 0
    while not following.is_full:
        sent += 1
        following.on_sent(1 + sent, 30)
    assert sent == 4
    following.on_matched(2)
    assert not following.is_full
    for last in range(6, 1000):
        if following.is_full:
            break
        following.on_sent(last, 0)
    assert len(following.in_flight) == progress.IN_FLIGHT_MESSAGES_MAX


def test_follower_progress_probes_with_one_message_in_flight() -> None:
    following = FollowerProgress(10)
    assert not following.is_full
    following.on_sent(12, 5)
    assert following.is_full
    following.on_refused(9, 4)
    assert (following.next, following.is_full) == (5, False)
    following.on_refused(9, 2)
    assert following.next == 5, "the answer to an older probe"
    following.on_matched(7)
    assert (following.mode, following.next, following.match) == (Mode.REPLICATE, 8, 7)
    following.on_refused(6, 3)
    assert (following.mode, following.next) == (Mode.REPLICATE, 8), "it has agreed to more since"


def test_follower_progress_stays_in_snapshot_mode_until_snapshot_matches() -> None:
    following = FollowerProgress(3)
    following.on_snapshot(LogIndex(50, 4))
    assert following.is_full
    following.on_refused(50, 1)
    following.on_matched(20)
    assert (following.mode, following.match, following.snapshot) == (Mode.SNAPSHOT, 20, LogIndex(50, 4))
    following.on_matched(50)
    assert (following.mode, following.next, following.snapshot) == (Mode.REPLICATE, 51, None)


class BytesReader:
    """A reader of a snapshot in memory."""

    def __init__(self, content: bytes) -> None:
        self.content, self.is_closed = content, False
        digest = hashlib.sha256(content).digest()
        self.meta = SnapshotMeta(bytes(16), 1, LogIndex(9, 2), len(content), digest)

    def read_at(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]

    def close(self) -> None:
        self.is_closed = True


SENDING = st.tuples(
    st.sampled_from(["arrive", "answer", "lose", "repeat", "heartbeat", "forget"]), st.integers(0, 9)
)


@given(st.binary(min_size=1, max_size=60), st.lists(SENDING, max_size=40))
def test_snapshot_sender_delivers_whole_snapshot_over_unreliable_network(
    content: bytes, steps: list[tuple[str, int]]
) -> None:
    """The follower may also forget what it had. No more than the window is under way at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replication, "WINDOW_BYTES", 12)
        patch.setattr(replication, "CHUNK_BYTES_MAX", 5)
        sender = SnapshotSender(BytesReader(content))  # type: ignore[arg-type]
        received, chunks, replies = bytearray(), list(sender.chunks(3)), list[InstallSnapshotReply]()

        def act(action: str, number: int) -> None:
            queue: list[InstallSnapshot] | list[InstallSnapshotReply] = chunks if number % 2 else replies
            match action:
                case "arrive" if chunks:
                    chunk = chunks.pop(number % len(chunks))
                    if chunk.offset <= len(received):
                        received.extend(chunk.data[len(received) - chunk.offset :])
                    replies.append(reply_to(chunk, len(received)))
                case "answer" if replies:
                    sender.on_reply(replies.pop(number % len(replies)))
                case "heartbeat":
                    chunks.extend(sender.on_heartbeat(3))
                case "forget":
                    received.clear()
                case "lose" if queue:
                    del queue[number % len(queue)]
                case "repeat" if queue:
                    queue.append(queue[number % len(queue)])  # type: ignore[arg-type]
            more = list(sender.chunks(3))
            assert sum(len(chunk.data) for chunk in more) < 12 + 5
            chunks.extend(more)

        for action, number in steps:
            act(action, number)
        for _ in range(100):
            if received == content and not chunks and not replies:
                break
            act("arrive", 0)
            act("answer", 0)
            if not chunks and not replies:
                act("heartbeat", 0)
        assert bytes(received) == content
        sender.close()


def reply_to(chunk: InstallSnapshot, received: int) -> InstallSnapshotReply:
    reached = chunk.offset + len(chunk.data)
    return InstallSnapshotReply(chunk.term, chunk.snapshot, reached, received, False, claim_of("n2"))


def test_snapshot_sender_resends_bytes_reported_lost_by_receiver() -> None:
    sender = SnapshotSender(BytesReader(b"snapshot"))  # type: ignore[arg-type]
    [whole] = sender.chunks(3)
    sender.on_reply(reply_to(whole, 8))
    assert list(sender.chunks(3)) == []
    assert list(sender.on_heartbeat(3)) == []
    [question] = sender.on_heartbeat(3)
    assert (question.offset, question.data) == (8, b"")
    sender.on_reply(reply_to(question, 0))
    assert [(chunk.offset, chunk.data) for chunk in sender.chunks(4)] == [(0, b"snapshot")]


def test_snapshot_sender_sends_each_byte_once_over_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat without an answer proves no loss."""
    monkeypatch.setattr(replication, "CHUNK_BYTES_MAX", 5)
    content = bytes(range(50))
    sender = SnapshotSender(BytesReader(content))  # type: ignore[arg-type]
    under_way = list(sender.chunks(3))
    assert b"".join(chunk.data for chunk in under_way) == content
    received = 0
    while under_way:
        under_way += [*sender.on_heartbeat(3), *sender.chunks(3)][: len(under_way)]
        chunk = under_way.pop(0)
        assert chunk.offset == received or not chunk.data
        received += len(chunk.data)
        sender.on_reply(reply_to(chunk, received))
        if received == len(content) and not chunk.data:
            break
    assert received == len(content)
    assert list(sender.chunks(3)) == []


def test_snapshot_sender_skips_bytes_received_over_earlier_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication, "WINDOW_BYTES", 10)
    monkeypatch.setattr(replication, "CHUNK_BYTES_MAX", 5)
    sender = SnapshotSender(BytesReader(bytes(100)))  # type: ignore[arg-type]
    first, second = sender.chunks(3)
    for chunk in (first, second):
        sender.on_reply(reply_to(chunk, 90))
    assert [(chunk.offset, len(chunk.data)) for chunk in sender.chunks(3)] == [(90, 5), (95, 5)]


def test_nowhere_is_log_index_0_of_term_0() -> None:
    assert LogIndex(0, 0) == NOWHERE
