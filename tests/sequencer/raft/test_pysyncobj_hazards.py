"""Hazards of PySyncObj, each shown on PySyncObj as released, and that rt's Raft avoids them.

PySyncObj runs as released, except that it has no thread and a transport that a test reads and feeds. A test
of PySyncObj asserts that it *does* break. If a later version repairs something, its test fails, and rt may
replace less of PySyncObj.
"""

from __future__ import annotations

import contextlib
import gzip
import mmap
import os
import pickle
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pysyncobj.journal
import pysyncobj.syncobj
import pysyncobj.tcp_connection
import pytest
from disks import PowerCut
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, replicated
from pysyncobj.config import SERIALIZER_STATE
from pysyncobj.journal import createJournal
from pysyncobj.node import Node
from pysyncobj.poller import POLL_EVENT_TYPE
from pysyncobj.tcp_connection import CONNECTION_STATE, TcpConnection
from pysyncobj.transport import Transport
from raft_bench import (
    DIRECTORY,
    Clock,
    Driven,
    claim_of,
    config_of,
    disk_id,
    entries_of,
    only,
)

import rt
from rt.errors import Corrupt, FormatError
from sequencer.raft.model.cluster_state import INITIAL, initial_state
from sequencer.raft.model.entry_codec import encode_commands
from sequencer.raft.model.messages import (
    COMMAND_BYTES_MAX,
    AppendEntries,
    AppendEntriesReply,
    Forward,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    RaftEntry,
)
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.transport.codec import decode, encode
from sequencer.raft.transport.frames import FRAME_HEADER_BYTES, decode_header

# PySyncObj leaves its files open until garbage collection.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

Message = dict[str, Any]
NO_OP = (b"\x01", 1, 0)
"""The first entry of a PySyncObj log."""


class Recorder(Transport):
    """A transport that records what PySyncObj sends."""

    def __init__(self) -> None:
        super().__init__(None, None, ())
        self.sent: list[tuple[str, Message]] = []

    def send(self, node: Node, message: Message) -> bool:
        self.sent.append((node.id, message))
        return True

    def of(self, kind: str) -> list[Message]:
        return [message for _, message in self.sent if message["type"] == kind]


class Stock(SyncObj):
    """A PySyncObj node that keeps the added items, and acknowledges as released."""

    def __init__(self, name: str = "a", members: str = "abc", **settings: Any) -> None:
        self.recorder = Recorder()
        conf = SyncObjConf(autoTick=False, useFork=False, **settings)
        peers = [Node(peer) for peer in members if peer != name]
        super().__init__(Node(name), peers, conf, transport=self.recorder)
        self.items: list[str] = []
        for peer in peers:
            self.recorder._onNodeConnected(peer)

    @replicated
    def add(self, item: str) -> None:
        self.items.append(item)

    def private(self, name: str) -> Any:
        return getattr(self, f"_SyncObj__{name}")

    def hear(self, peer: str, **message: Any) -> None:
        self.recorder._onMessageReceived(Node(peer), message)

    def append(
        self, term: int, prev: tuple[int, int], entries: list[Any], commit: int, peer: str = "b"
    ) -> None:
        place = {"prevLogIdx": prev[0], "prevLogTerm": prev[1]}
        self.hear(peer, type="append_entries", term=term, commit_index=commit, entries=entries, **place)

    def entry(self, item: str, index: int, term: int) -> tuple[bytes, int, int]:
        return b"\0" + pickle.dumps((self._methodToID["add_v0"], (item,)), 2), index, term

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.doTick(0.0)

    def lead(self, clock: Clock) -> None:
        """Win an election with injected votes of silent peers."""
        clock.advance(2.0)
        self.tick()
        for peer in self.otherNodes:
            self.hear(peer.id, type="response_vote", term=self.raftCurrentTerm)
        self.tick()
        assert self._isLeader()

    def index(self) -> int:
        return self.private("raftLog")[-1][1]


def acknowledged(outcomes: list[Any]) -> Callable[[Any, Any], None]:
    """Return a callback that records what was acknowledged."""
    return lambda _result, reason: outcomes.append(reason)


def ours(clock: Clock, members: int = 3, **settings: Any) -> Driven:
    driven = Driven(clock, config_of("n1", ["n1", "n2", "n3", "n4", "n5"][:members], **settings))
    driven.adopt()
    return driven


def our_single(clock: Clock, **settings: Any) -> Driven:
    """Return the leader of a single-node cluster of rt."""
    driven = Driven(clock, config_of("n1", ["n1"], bootstrap=True, **settings))
    run(driven)
    assert driven.raft.role == "leader"
    return driven


def run(driven: Driven, rounds: int = 4) -> None:
    for _ in range(rounds):
        driven.clock.advance(0.001)
        driven.step()


# --- A. What survives ------------------------------------------------------------------------------------


def test_pysyncobj_acknowledges_command_without_fsync(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the mapped journal nor any file is synced before an acknowledgement."""
    synced: list[str] = []

    class Watched(mmap.mmap):
        def flush(self, *arguments: Any) -> None:
            synced.append("mmap")
            super().flush(*arguments)

    monkeypatch.setattr(pysyncobj.journal, "mmap", SimpleNamespace(mmap=Watched))
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *_, name=name: synced.append(name))
    outcomes: list[Any] = []
    stock = Stock(members="a", journalFile=str(tmp_path / "journal"))
    clock.advance(2.0)
    stock.tick(2)
    stock.add("x", callback=acknowledged(outcomes))
    stock.tick(3)
    assert (outcomes, stock.items) == ([FAIL_REASON.SUCCESS], ["x"])
    assert synced == []
    stock.destroy()
    assert synced == ["mmap"], "the watch works"


def test_rt_keeps_acknowledged_command_after_power_cut(clock: Clock) -> None:
    driven = our_single(clock)
    [future] = driven.propose(b"x")
    run(driven)
    assert future.done()
    later = driven.reopened("none")
    run(later)
    assert later.commands == [b"x"]


def test_pysyncobj_votes_twice_in_one_term_if_vote_file_is_empty(clock: Clock, tmp_path: Path) -> None:
    """A power cut may leave an empty file if the file was renamed and never synced."""
    journal = tmp_path / "journal"
    vote = {"type": "request_vote", "term": 5, "last_log_index": 9, "last_log_term": 4}
    for turn, peer in enumerate("bc"):
        if turn:
            (tmp_path / "journal.meta").write_bytes(b"")
        stock = Stock(journalFile=str(journal))
        stock.hear(peer, **vote)
        assert stock.recorder.of("response_vote") == [{"type": "response_vote", "term": 5}]
        stock.destroy()


def test_rt_raises_corrupt_at_start_if_vote_is_lost(clock: Clock) -> None:
    driven = ours(clock)
    driven.request_vote("n2", 5, LogIndex(9, 4))
    disk = driven.kept("none")
    for path in [path for path in disk.paths() if "/log." in path]:
        disk.remove(path)
    disk.sync_directory(DIRECTORY)
    with pytest.raises(Corrupt, match="its vote is lost"):
        Driven(clock, driven.config, disk)


def test_pysyncobj_loses_acknowledged_entries_if_killed_between_dump_and_compaction(
    clock: Clock, tmp_path: Path
) -> None:
    """The disk is in the state between the child's rename of the dump and the parent's compaction."""
    settings = {"journalFile": str(tmp_path / "journal"), "fullDumpFile": str(tmp_path / "dump")}
    stock = Stock(members="a", **settings)
    clock.advance(2.0)
    stock.tick(2)
    for item in "abcde":
        stock.add(item)
        stock.tick(2)
    stock.forceLogCompaction()
    stock.tick()
    # The child has renamed the dump. The parent has not waited for the child yet, and continues.
    stock.private("serializer").checkSerializing = lambda: (SERIALIZER_STATE.SERIALIZING, 1)
    outcomes: list[Any] = []
    for item in "fgh":
        stock.add(item, callback=acknowledged(outcomes))
        stock.tick(2)
    assert outcomes == [FAIL_REASON.SUCCESS] * 3
    stock.private("raftLog").flush()  # kill -9: written bytes survive.
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("journal", "journal.meta", "dump"):
        shutil.copy(tmp_path / name, killed / name)
    stock.destroy()
    settings = {"journalFile": str(killed / "journal"), "fullDumpFile": str(killed / "dump")}
    again = Stock(members="a", **settings)
    clock.advance(2.0)
    again.tick(5)
    assert again.items == list("abcde"), "the acknowledged f, g and h are gone"
    again.destroy()


def test_rt_keeps_entries_after_snapshot_if_restarted_before_compaction(clock: Clock) -> None:
    driven = our_single(clock, snapshot_ms=100, keep_entries=1)
    for item in (b"a", b"b", b"c"):
        driven.propose(item)
        run(driven)
    driven.worker.is_held = True
    clock.advance(0.2)
    run(driven)
    assert driven.worker.waiting
    driven.worker.work()  # The snapshot is durable and named; the loop does not know yet.
    futures = driven.propose(b"d", b"e")
    driven.worker.collect, collect = (lambda: None), driven.worker.collect
    run(driven)
    assert all(future.done() for future in futures)
    driven.worker.collect = collect
    later = driven.reopened("none")
    assert later.commands == [b"a", b"b", b"c"]
    run(later)
    assert later.commands == [b"a", b"b", b"c", b"d", b"e"]


def test_pysyncobj_acknowledges_without_majority_below_stale_commit_index(
    clock: Clock, tmp_path: Path
) -> None:
    """The end of the journal was lost, but the commit index stored beside it was not."""
    journal = createJournal(str(tmp_path / "journal"))
    journal.add(*NO_OP)
    journal.setCurrentTerm(1, None)
    journal.setRaftCommitIndex(10)
    journal.onOneSecondTimer()
    journal._destroy()
    stock = Stock(journalFile=str(tmp_path / "journal"))
    stock.lead(clock)
    outcomes: list[Any] = []
    stock.add("no majority", callback=acknowledged(outcomes))
    stock.tick(3)
    assert (outcomes, stock.items) == ([FAIL_REASON.SUCCESS], ["no majority"])
    assert not stock.recorder.of("next_node_idx")
    stock.destroy()


def test_rt_restarts_with_commit_index_of_its_snapshot(clock: Clock) -> None:
    driven = ours(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2]), commit=4)
    driven.step()
    assert driven.status.committed == 4
    driven = driven.reopened()
    assert driven.status.committed == 1
    driven.lead()
    [future] = driven.propose(b"no majority")
    run(driven)
    assert (driven.status.committed, driven.commands, future.done()) == (1, [], False)


class Killed(BaseException):
    """An exception that stands for a kill -9."""


def test_pysyncobj_loses_journal_tail_if_killed_during_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = createJournal(str(path))
    for index in range(1, 21):
        journal.add(b"command", index, 1)
    added: list[int] = []
    add = type(journal).add

    def add_until_killed(self: Any, command: bytes, index: int, term: int) -> None:
        if len(added) == 3:
            raise Killed
        added.append(index)
        add(self, command, index, term)

    monkeypatch.setattr(type(journal), "add", add_until_killed)
    with pytest.raises(Killed):
        journal.deleteEntriesTo(10)
    monkeypatch.undo()
    journal._destroy()
    again = createJournal(str(path))
    assert [entry[1] for entry in again[:]] == [11, 12, 13], "14 to 20 were acknowledged"
    again._destroy()


@pytest.mark.parametrize("keep", ["all", "none", "some"])
def test_rt_keeps_log_tail_after_power_cut_at_any_point_of_compaction(clock: Clock, keep: Any) -> None:
    for change in range(1, 60):
        driven = ours(clock)
        driven.log._segment_bytes = 1
        for index in range(2, 12):
            driven.append(2, LogIndex(index - 1, 2 if index > 2 else 1), entries_of([2], start=index))
        driven.disk.cut_power_at(driven.disk.changes + change)
        with contextlib.suppress(PowerCut):
            driven.log.compact(9)
        is_cut = driven.disk.is_off
        disk = driven.kept(keep, change)
        log = DurableLog.open(DIRECTORY, disk=disk)
        assert log.base.index < 9
        assert log.last == LogIndex(11, 2)
        log.close()
        if not is_cut:
            return
    pytest.fail("it never ends")


def dump(stock: Stock, items: list[str], index: int, term: int) -> bytes:
    """Return a PySyncObj snapshot of these items that covers the log up to `index`."""
    entries = [stock.entry("-", at, term) for at in (index, index - 1)]
    return gzip.compress(pickle.dumps(({"items": items}, *entries, set()), 2))


def install(stock: Stock, content: bytes, *, term: int, commit: int, peer: str = "b") -> None:
    for serialized in ((content, True, False), (b"", False, True)):
        stock.hear(peer, type="append_entries", term=term, commit_index=commit, serialized=serialized)


def test_pysyncobj_runs_with_empty_state_if_snapshot_is_corrupt(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(b"damaged")
    stock = Stock(fullDumpFile=str(tmp_path / "dump"))
    stock.tick(3)
    assert (stock.items, stock.raftLastApplied) == ([], 1)
    stock.append(1, (1, 0), [], 1)
    assert stock.recorder.of("next_node_idx")[-1]["success"] is True, "it takes part"
    stock.destroy()


def test_pysyncobj_acknowledges_uncompared_entries_if_snapshot_install_fails(clock: Clock) -> None:
    stock = Stock()
    stock.append(1, (1, 0), [stock.entry(item, at, 1) for at, item in enumerate("xyz", 2)], 1)
    stock.recorder.sent.clear()
    install(stock, b"damaged", term=2, commit=1, peer="c")
    [reply] = stock.recorder.of("next_node_idx")
    assert (reply["success"], reply["next_node_idx"]) == (True, 5), "entries 2 to 4 were never compared"


def test_rt_neither_installs_nor_starts_with_corrupt_snapshot(clock: Clock) -> None:
    driven = ours(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2]), commit=1)
    sent = driven.hear("n3", InstallSnapshot(3, LogIndex(9, 3), 3, bytes(32), 0, b"bad"))
    run(driven)
    assert not any(isinstance(message, InstallSnapshotReply) and message.installed for message in sent)
    assert driven.append(3, LogIndex(9, 3), peer="n3").matched is False
    disk = driven.kept("all")
    disk.flip_bit(f"{DIRECTORY}/snapshot.1", 120, 0)
    with pytest.raises(Corrupt):
        Driven(clock, driven.config, disk)


# --- B. The protocol -------------------------------------------------------------------------------------


def test_pysyncobj_applies_uncommitted_tail_after_empty_snapshot_chunk(clock: Clock) -> None:
    """This is fatal if every node must build the same bytes. Even an empty chunk causes it."""
    stock = Stock()
    stock.append(1, (1, 0), [stock.entry(item, at, 1) for at, item in enumerate("xyz", 2)], 1)
    stock.hear("c", type="append_entries", term=2, commit_index=4, serialized=None)
    stock.tick()
    assert stock.items == ["x", "y", "z"], "the leader of term 2 may have other entries there"


def test_rt_commits_only_compared_entries_after_snapshot_chunk(clock: Clock) -> None:
    driven = ours(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2]), commit=1)
    driven.hear("n3", InstallSnapshot(3, LogIndex(9, 3), 10, bytes(32), 0, b"abc"))
    driven.append(3, INITIAL, commit=4, peer="n3")
    run(driven)
    assert (driven.commands, driven.status.committed) == ([], 1)


def test_pysyncobj_applies_command_twice_if_callback_fails(clock: Clock) -> None:
    def fail(_result: Any, _reason: Any) -> None:
        raise LookupError

    stock = Stock(members="a")
    clock.advance(2.0)
    stock.tick(2)
    stock.add("x", callback=fail)
    with pytest.raises(LookupError):
        stock.tick(3)
    stock.tick(3)
    assert stock.items == ["x", "x"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rt_applies_command_once_if_callback_fails(clock: Clock) -> None:
    def fail(_future: Any) -> None:
        raise LookupError

    driven = our_single(clock)
    driven.propose(b"x")[0].add_done_callback(fail)
    run(driven)
    assert driven.commands == [b"x"]


def test_rt_stops_without_reapplying_if_state_machine_fails(clock: Clock) -> None:
    def fail(index: int, command: bytes) -> None:
        applied.append((index, command))
        raise LookupError

    applied: list[tuple[int, bytes]] = []
    driven = our_single(clock)
    driven.machine.apply = fail
    driven.propose(b"x")
    with pytest.raises(LookupError):
        run(driven)
    driven.step()
    assert applied == [(1, b"x")]
    later = driven.reopened("none")
    run(later)
    assert later.commands == [b"x"]


def test_pysyncobj_drops_acknowledged_entries_after_late_append(clock: Clock) -> None:
    stock = Stock()
    entries = [stock.entry(item, at, 1) for at, item in enumerate("wxyz", 2)]
    stock.append(1, (1, 0), entries, 5)
    stock.tick()
    assert (stock.items, stock.recorder.of("next_node_idx")[-1]["next_node_idx"]) == (list("wxyz"), 6)
    stock.append(1, (1, 0), entries[:1], 5)
    assert (stock.index(), stock.raftLastApplied) == (2, 5)


def test_rt_keeps_all_entries_after_late_append(clock: Clock) -> None:
    driven = ours(clock)
    entries = entries_of([2, 2, 2, 2])
    driven.append(2, INITIAL, entries, commit=5)
    driven.append(2, INITIAL, entries[:1], commit=5)
    assert driven.log.last == LogIndex(5, 2)
    assert driven.reopened("none").log.last == LogIndex(5, 2)


def test_pysyncobj_counts_acknowledgement_of_earlier_term(clock: Clock) -> None:
    """The acknowledgement does not contain its term. The entry at that index has been cut since then."""
    stock = Stock()
    stock.lead(clock)
    for item in ("old", "older"):
        stock.add(item)
        stock.tick()
    assert stock.index() == 4
    late = {"type": "next_node_idx", "next_node_idx": 5, "reset": False, "success": True}
    term = stock.raftCurrentTerm + 1
    stock.append(term, (1, 0), [(b"\x01", 2, term)], 1, peer="c")
    stock.lead(clock)
    outcomes: list[Any] = []
    stock.add("x", callback=acknowledged(outcomes))
    stock.tick()
    assert stock.index() == 4
    stock.hear("b", **late)
    stock.tick(2)
    assert (outcomes, stock.items) == ([FAIL_REASON.SUCCESS], ["x"]), "on one node of three"


def test_rt_ignores_acknowledgement_of_earlier_term(clock: Clock) -> None:
    driven = ours(clock)
    term = driven.lead()
    driven.hear("n3", AppendEntriesReply(term + 1, False, 2, 1, claim_of("n3")))
    driven.lead()
    driven.propose(b"x")
    driven.step()
    driven.acknowledge("n2", driven.log.last.index, term=term)
    run(driven)
    assert (driven.commands, driven.status.committed) == ([], 1)


def test_pysyncobj_discards_log_ahead_of_installed_snapshot(clock: Clock) -> None:
    stock = Stock()
    stock.append(1, (1, 0), [stock.entry(item, at, 1) for at, item in enumerate("vwxyz", 2)], 6)
    stock.tick()
    assert (stock.items, stock.raftLastApplied) == (list("vwxyz"), 6)
    install(stock, dump(stock, list("vw"), 3, 1), term=1, commit=6)
    assert (stock.items, stock.index()) == (list("vw"), 3)


def test_rt_keeps_log_ahead_of_received_snapshot(clock: Clock) -> None:
    driven = ours(clock)
    driven.append(2, INITIAL, entries_of([2] * 5), commit=6)
    run(driven)
    driven.hear("n2", InstallSnapshot(2, LogIndex(3, 2), 100, bytes(32), 0, b"abc"))
    run(driven)
    assert (driven.status.applied, driven.log.last, len(driven.commands)) == (6, LogIndex(6, 2), 5)


def test_pysyncobj_counts_repeated_vote_of_one_voter_twice(clock: Clock) -> None:
    stock = Stock(members="abcde")
    clock.advance(2.0)
    stock.tick()
    for _ in range(2):
        stock.hear("b", type="response_vote", term=stock.raftCurrentTerm)
    assert stock._isLeader(), "with two of five"


def test_rt_counts_repeated_vote_of_one_voter_once(clock: Clock) -> None:
    driven = ours(clock, 5)
    term = driven.stand()
    for _ in range(3):
        driven.grant("n2", term, pre=False)
    assert driven.raft.role == "candidate"


def test_pysyncobj_finishes_large_command_before_its_last_piece(clock: Clock) -> None:
    """The pickled entry is longer than the command, and PySyncObj detects the last piece by the length of the
    command.
    """
    leader = Stock(appendEntriesBatchSizeBytes=100)
    leader.lead(clock)
    leader.hear("b", type="next_node_idx", next_node_idx=leader.index() + 1, reset=False, success=True)
    leader.recorder.sent.clear()
    leader._applyCommand(b"\x01" + bytes(189), None)
    leader.tick()
    clock.advance(1.0)
    leader.tick()
    pieces = [message for to, message in leader.recorder.sent if to == "b" and "transmission" in message]
    assert [piece["transmission"] for piece in pieces].count("finish") > 1
    follower = Stock("b")
    follower.append(1, (1, 0), [(b"\x01", 2, pieces[0]["prevLogTerm"])], 1, peer="a")
    with pytest.raises((pickle.UnpicklingError, EOFError, ValueError)):
        for piece in pieces:
            follower.recorder._onMessageReceived(Node("a"), piece)


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 131_070, COMMAND_BYTES_MAX])
def test_rt_replicates_commands_of_any_size_unchanged(clock: Clock, size: int) -> None:
    driven = ours(clock)
    driven.lead()
    driven.acknowledge("n2", 2)
    command = os.urandom(size)
    driven.propose(command)
    append = only([message for to, message in driven.step() if to == "n2"], AppendEntries)
    [follower] = [ours(clock)]
    frame = b"".join(encode(append._replace(prev=INITIAL, entries=_moved(append, 2)), 1))
    header = decode_header(frame)
    assert len(frame) == FRAME_HEADER_BYTES + header.length
    received = decode(header.kind, frame[FRAME_HEADER_BYTES:])
    assert isinstance(received, AppendEntries)
    follower.hear("n2", received._replace(applied=0))
    assert follower.log.entry(2).content == append.entries[0].content


def _moved(append: AppendEntries, index: int) -> tuple[RaftEntry, ...]:
    return tuple(entry._replace(index=at) for at, entry in enumerate(append.entries, index))


def test_pysyncobj_sends_no_reply_to_stale_leader(clock: Clock) -> None:
    stock = Stock()
    stock.append(7, (1, 0), [], 1)
    stock.recorder.sent.clear()
    stock.append(3, (1, 0), [], 1, peer="c")
    assert stock.recorder.sent == []


def test_rt_replies_to_stale_leader_with_current_term(clock: Clock) -> None:
    driven = ours(clock)
    driven.append(7, INITIAL)
    assert driven.append(3, INITIAL, peer="n3").term == 7


def test_pysyncobj_leader_steps_down_for_outdated_candidate_of_higher_term(clock: Clock) -> None:
    stock = Stock()
    stock.lead(clock)
    stock.hear("c", type="request_vote", term=1000, last_log_index=0, last_log_term=0)
    assert (stock._isLeader(), stock.raftCurrentTerm) == (False, 1000)


def test_rt_leader_stays_leader_at_vote_request_of_higher_term(clock: Clock) -> None:
    driven = ours(clock)
    term = driven.lead()
    driven.request_vote("n3", 1000, INITIAL)
    assert (driven.raft.role, driven.raft.term) == ("leader", term)


def test_pysyncobj_never_calls_callback_of_command_covered_by_snapshot(clock: Clock) -> None:
    stock = Stock()
    stock.append(1, (1, 0), [], 1)
    outcomes: list[Any] = []
    stock.add("mine", callback=acknowledged(outcomes))
    stock.tick()
    [request] = stock.recorder.of("apply_command")
    answer = {"request_id": request["request_id"], "log_idx": 5, "log_term": 1}
    stock.hear("b", type="apply_command_response", **answer)
    install(stock, dump(stock, ["mine"], 9, 1), term=1, commit=9)
    stock.append(1, (9, 1), [stock.entry("more", 10, 1)], 10)
    stock.tick(10)
    assert (stock.items, outcomes) == (["mine", "more"], []), "it is applied, and nobody will ever be told"


def test_pysyncobj_applies_repeated_forwarded_command_twice(clock: Clock) -> None:
    stock = Stock()
    stock.lead(clock)
    entry, _, _ = stock.entry("x", 0, 0)
    for _ in range(2):
        stock.hear("b", type="apply_command", command=entry)
        stock.tick()
    stock.hear("b", type="next_node_idx", next_node_idx=stock.index() + 1, reset=False, success=True)
    stock.tick()
    assert stock.items == ["x", "x"]


def test_rt_applies_repeated_forwarded_command_once(clock: Clock) -> None:
    driven = ours(clock)
    driven.lead()
    pack = Forward(encode_commands(disk_id("n2"), 1, 1, 1, [b"x"]))
    driven.hear("n2", pack, pack, pack)
    run(driven)
    assert driven.log.last.index == 5
    driven.acknowledge("n2", 5)
    run(driven)
    assert (driven.status.applied, driven.commands) == (5, [b"x"])


# --- C. Process and network ------------------------------------------------------------------------------


class StillPoller:
    """A poller with events that a test triggers itself."""

    def subscribe(self, descriptor: int, callback: Callable[[int, int], None], _mask: int) -> None:
        self.event = lambda: callback(descriptor, POLL_EVENT_TYPE.READ)

    def unsubscribe(self, descriptor: int) -> None:
        pass


@pytest.fixture
def ends(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TcpConnection, StillPoller, socket.socket]]:
    """Yield a PySyncObj connection, its poller, and the socket at the other end."""
    monkeypatch.setattr(pysyncobj.tcp_connection, "monotonicTime", lambda: clock.now)
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    poller = StillPoller()
    connection = TcpConnection(poller, socket=near, timeout=3.5)
    yield connection, poller, far
    connection.disconnect()
    far.close()


def test_pysyncobj_closes_idle_connection_and_loses_first_vote_request(
    clock: Clock, ends: tuple[TcpConnection, StillPoller, socket.socket]
) -> None:
    """Followers send nothing to each other, so the first request_vote of an election is lost with the
    connection.

    test_raft_connections shows that rt keeps an idle connection open by pings.
    """
    connection, _, far = ends
    clock.advance(4.0)
    connection.send({"type": "request_vote"})
    assert connection.state == CONNECTION_STATE.DISCONNECTED
    assert far.recv(100) == b""


class MakesDirectory:
    """An object with a pickle that calls os.mkdir when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def stock_frame(message: Any) -> bytes:
    data = zlib.compress(pickle.dumps(message, 2))
    return len(data).to_bytes(4, "little") + data


def test_pysyncobj_executes_pickle_of_unidentified_peer(
    ends: tuple[TcpConnection, StillPoller, socket.socket], tmp_path: Path
) -> None:
    """PySyncObj loads the pickle before it has identified the peer."""
    _, poller, far = ends
    far.send(stock_frame(MakesDirectory(str(tmp_path / "made by a stranger"))))
    poller.event()
    assert (tmp_path / "made by a stranger").is_dir()


def test_pysyncobj_executes_pickle_in_forwarded_command(clock: Clock, tmp_path: Path) -> None:
    stock = Stock(members="a")
    clock.advance(2.0)
    stock.tick(2)
    stock.hear(
        "b", type="apply_command", command=b"\0" + pickle.dumps(MakesDirectory(str(tmp_path / "made")), 2)
    )
    with pytest.raises(KeyError):
        stock.tick(3)
    assert (tmp_path / "made").is_dir()


def test_rt_never_unpickles_received_bytes(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither frames nor commands nor snapshots are ever unpickled."""
    pickled = pickle.dumps(MakesDirectory(str(tmp_path / "made")), 2)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    with pytest.raises(FormatError):
        decode_header(stock_frame_of(pickled))
    for kind in range(2, 11):
        try:
            decode(kind, pickled)
        except FormatError:
            continue
        assert kind in {9, 10}, "only commands and snapshots are bytes as they come"
    driven = ours(clock)
    driven.lead()
    last = driven.log.last
    driven.hear("n2", *(Forward(head + pickled) for head in (b"", b"\0", b"\1", b"\2", b"\3", b"\x10")))
    assert driven.log.last == last
    driven.hear("n2", Forward(encode_commands(disk_id("n2"), 1, 1, 1, [pickled])))
    driven.acknowledge("n2", driven.log.last.index)
    run(driven)
    assert driven.commands == [pickled], "a command must be bytes, and stays bytes"
    assert not (tmp_path / "made").exists()


def stock_frame_of(pickled: bytes) -> bytes:
    data = zlib.compress(pickled)
    return len(data).to_bytes(4, "little") + data


def test_pysyncobj_applies_command_after_storage_failure(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PySyncObj's thread logs the error and ticks again. The entry was not stored, but it is in memory and is
    acknowledged.
    """
    stock = Stock(members="a")
    clock.advance(2.0)
    stock.tick(2)
    log = stock.private("raftLog")
    add = log.add

    def fails_behind_memory(command: bytes, index: int, term: int) -> None:
        add(command, index, term)
        raise OSError(5, "no such luck")

    monkeypatch.setattr(log, "add", fails_behind_memory)
    stock.add("x")
    with pytest.raises(OSError, match="no such luck"):
        stock.tick()
    stock.tick(3)
    assert stock.items == ["x"]


def test_rt_raises_storage_failed_without_applying_if_sync_fails(clock: Clock) -> None:
    driven = our_single(clock)
    [future] = driven.propose(b"x")
    driven.disk.fail("sync")
    for _ in range(3):
        with pytest.raises(rt.StorageFailed):
            run(driven)
    assert (driven.commands, future.done()) == ([], False)


def test_commands_of_disk_of_non_member_are_not_applied(clock: Clock) -> None:
    """PySyncObj accepts commands from any peer that connects as "readonly". In rt the log itself decides
    which disks are accepted.
    """
    state = initial_state(b"c" * 16, 1, {"n1": disk_id("n1")})
    applied = state.apply(RaftEntry(encode_commands(disk_id("stranger"), 1, 1, 1, [b"x"]), 2, 1))
    assert applied is not None
    assert applied.first is None
