"""The demo: its data, measurements and verdicts, the input it rejects, and runs with real nodes."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from click.testing import CliRunner
from frozen import is_still
from hypothesis import given
from hypothesis import strategies as st

from rt.bench.processes import ProcessTable
from rt.errors import RtError, Timeout
from rt.log.check.compare import Comparison, CopyDifference
from rt.log.check.status import LogStatus
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.message_batch import MessageBatch
from sequencer.demo import run as demo_run
from sequencer.demo.checks import Verdict, check_logs, check_messages
from sequencer.demo.cli import demo, summary
from sequencer.demo.figures import Burst, DeliveryTimes, Latency, longest_pause_s
from sequencer.demo.run import Demo, DemoPlan, DemoResult
from sequencer.demo.source import DemoRecord, csv_records, files_below, parts_of, share
from sequencer.demo.tally import SessionTally, Total, by_session
from sequencer.localcluster.node_log import NodeLog
from sequencer.localcluster.nodes import LocalCluster, Part
from sequencer.localcluster.processes import ProcessEnded, nothing_left, processes_with

WAIT_S: Final = 120.0
SESSIONS: Final = ("a", "b")
PARTS: Final[tuple[Part, ...]] = ("control", "data")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for index in range(6):
        path = root / f"d{index % 2}" / f"f{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(b"line %d of file %d\n" % (line, index) for line in range(600)))
    (root / "binary.bin").write_bytes(b"left out")
    return root


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_bytes(b"id,text\n" + b"".join(b'%d,"a ""b""\nc, %d"\r\n' % (row, row) for row in range(5000)))
    return path


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Publishing


def test_each_record_is_assigned_to_one_publisher(data: Path) -> None:
    files = [path.name for path in files_below(data)]
    assert files == ["f0.txt", "f2.txt", "f4.txt", "f1.txt", "f3.txt", "f5.txt"]
    whole = [record for part in parts_of(str(data)) for record in part()]
    assert len(whole) == 3600
    assert whole[600] == DemoRecord("d0/f2.txt", b"line 0 of file 2")
    for count in (1, 2, 4, 6, 7, 13):
        shares = [share(str(data), index, count) for index in range(count)]
        assert sorted(record for one in shares for record in one) == sorted(whole)
        assert all(shares)


def test_table_rows_are_assigned_to_publishers_in_turn(table: Path) -> None:
    first, second, third = (share(str(table), index, 3) for index in range(3))
    assert (len(first), len(second), len(third)) == (1667, 1667, 1666)
    assert second[1] == DemoRecord("t.csv", b'4,"a ""b""\nc, 4"')


@given(st.lists(st.lists(st.text('ab",\n\r', max_size=6), min_size=1, max_size=3), min_size=1, max_size=5))
def test_csv_records_are_split_whole_with_any_quoted_content(rows: list[list[str]]) -> None:
    quoted = [",".join('"' + field.replace('"', '""') + '"' for field in row).encode() for row in rows]
    assert list(csv_records(b"\n".join([b"names", *quoted]))) == quoted
    assert list(csv_records(b"\r\n".join([b"names", *quoted, b""]))) == quoted


def test_publisher_share_that_is_empty_or_unreadable_raises_error(tmp_path: Path) -> None:
    (tmp_path / "small.csv").write_bytes(b"id\n1\n2\n")
    assert [share(str(tmp_path / "small.csv"), index, 2) for index in range(2)] == [
        [DemoRecord("small.csv", b"1")],
        [DemoRecord("small.csv", b"2")],
    ]
    with pytest.raises(RtError, match=r"nothing to publish.*publisher 3 of 3"):
        share(str(tmp_path / "small.csv"), 2, 3)
    (tmp_path / "none").mkdir()
    with pytest.raises(RtError, match="nothing to publish"):
        share(str(tmp_path / "none"), 0, 1)
    (tmp_path / "bad.csv.zip").write_bytes(b"no zip")
    with pytest.raises(RtError, match="cannot read the data"):
        share(str(tmp_path / "bad.csv.zip"), 0, 1)


# Tallies

messages = st.tuples(
    st.integers(0, 1), st.builds(DemoRecord, st.sampled_from(["t", "u", ""]), st.binary(max_size=5))
)


def batches_of(rows: list[tuple[int, DemoRecord]], cuts: list[int]) -> list[MessageBatch]:
    """Return the rows as a subscriber gets them, cut into batches at `cuts`."""
    numbers = [0, 0]
    found = []
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    for start, end in itertools.pairwise(edges):
        some = rows[start:end]
        taken = []
        for session, _ in some:
            taken.append(numbers[session])
            numbers[session] += 1
        is_one = len({session for session, _ in some}) == 1
        topics = sorted({record.topic for _, record in some})
        found.append(
            MessageBatch(
                np.arange(start, end),
                np.zeros(end - start, np.int64),
                np.array(taken),
                (SESSIONS[some[0][0]],) if is_one else SESSIONS,
                (0,) if is_one else (0,) * len(SESSIONS),
                None if is_one else np.array([session for session, _ in some]),
                tuple(topics),
                None if len(topics) == 1 else np.array([topics.index(record.topic) for _, record in some]),
                np.cumsum([0, *(len(record.value) for _, record in some)]).astype(np.int32),
                memoryview(b"".join(record.value for _, record in some)),
            )
        )
    return found


def sent_and_got(
    rows: list[tuple[int, DemoRecord]], cuts: list[int]
) -> tuple[dict[str, Total], dict[str, Total]]:
    sent = {name: SessionTally() for name in SESSIONS}
    for session, record in rows:
        sent[SESSIONS[session]].add([record])
    got = {name: SessionTally() for name in SESSIONS}
    for batch in batches_of(rows, cuts):
        for name, part in by_session(batch):
            got[name].add_batch(part)
    return (
        {name: tally.total() for name, tally in sent.items()},
        {name: tally.total() for name, tally in got.items()},
    )


@given(st.lists(messages, min_size=1, max_size=20), st.lists(st.integers(1, 20)))
def test_tallies_are_equal_however_messages_are_split_into_batches(
    rows: list[tuple[int, DemoRecord]], cuts: list[int]
) -> None:
    sent, got = sent_and_got(rows, cuts)
    assert sent == got


@given(st.lists(messages, min_size=2, max_size=8), st.data())
def test_tallies_differ_if_messages_of_session_differ(
    rows: list[tuple[int, DemoRecord]], draw: st.DataObject
) -> None:
    other = draw.draw(st.lists(messages, min_size=1, max_size=8) | st.permutations(rows))
    is_same = all(
        [record for at, record in rows if at == session] == [record for at, record in other if at == session]
        for session in (0, 1)
    )
    assert (sent_and_got(rows, [])[0] == sent_and_got(other, [])[0]) is is_same


def test_tally_reports_first_out_of_order_number() -> None:
    rows = [(0, DemoRecord("t", b"x"))] * 5
    first, second = batches_of(rows, [2])
    tally = SessionTally()
    tally.add_batch(second)
    tally.add_batch(first)
    assert tally.total().fault == "number 2 where 0 must follow"


# Verdicts and figures


def verdicts(sent: dict[str, Total], got: dict[str, Total], fault: str = "") -> dict[str, bool]:
    return {verdict.promise: verdict.holds for verdict in check_messages(sent, got, fault)}


def test_each_violated_guarantee_is_reported() -> None:
    good = {"a": Total(3, 9, "x"), "b": Total(2, 4, "y")}
    assert set(verdicts(good, good).values()) == {True}
    assert not verdicts({}, {})["nothing lost, nothing added"]
    lost = {**good, "b": Total(1, 2, "z")}
    assert verdicts(good, lost) == {
        "nothing lost, nothing added": False,
        "nothing duplicated or reordered": True,
        "every byte as it was sent": False,
        "one order for all": True,
    }
    assert not verdicts(good, {"a": good["a"]})["nothing lost, nothing added"]
    assert not verdicts(good, {**good, "c": Total(1, 1, "z")})["nothing lost, nothing added"]
    again = {**good, "b": Total(2, 4, "y", "number 0 where 1 must follow")}
    assert not verdicts(good, again)["nothing duplicated or reordered"]
    assert not verdicts(good, good, "position 3 where 2 must follow")["one order for all"]


def log_of(path: str) -> LogStatus:
    return LogStatus(path, LogIdentity(LogKind.MERGED, bytes(16), "demo"), None, ())


def test_merged_logs_that_differ_or_end_early_are_reported() -> None:
    logs = (log_of("/n1"), log_of("/n2"))
    assert all(verdict.holds for verdict in check_logs(Comparison(logs, (), 0), 0, []))
    same, whole = check_logs(Comparison(logs, (CopyDifference("other bytes", "/n1", "/n2"),), 0), 0, ["bad"])
    assert (same.holds, same.reason) == (False, "/n1 and /n2 differ: other bytes")
    assert (whole.holds, whole.reason) == (False, "bad")
    same, _ = check_logs(Comparison(logs, (), 0), 5, [])
    assert (same.holds, same.reason) == (False, "/n1 ends at 0, not at 5; /n2 ends at 0, not at 5")


def test_latency_and_pause_use_times_within_their_window() -> None:
    published = np.arange(100) * 10**9
    times = DeliveryTimes(published, published + np.where(published < 50 * 10**9, 2_000_000, 9_000_000))
    assert times.latency(0, 50 * 10**9) == Latency(50, 2.0, 2.0)
    assert times.latency(50 * 10**9, 10**12) == Latency(50, 9.0, 9.0)
    assert times.latency(10**12, 10**13) is None
    events = np.array([5, 1, 9, 30]) * 10**9
    assert longest_pause_s(events, 0, 12 * 10**9) == 4.0
    assert longest_pause_s(events, 10 * 10**9, 20 * 10**9) == 10.0


def test_summary_marks_violated_guarantee_as_fail() -> None:
    found = tuple(check_messages({"a": Total(2, 2, "x")}, {"a": Total(1, 1, "z")}, ""))
    lines = list(summary(DemoResult(2, 2, None, None, Burst(2, 2, 1.0), found)))
    assert lines[1].startswith("throughput  0 MB/s, 2 messages/s: 2 messages in 1.00 s")
    assert lines[2] == "FAIL        nothing lost, nothing added: 1 of 2 messages; of a 1 of 2"
    assert lines[3].startswith("ok          nothing duplicated or reordered")


# Refused options and remaining files


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "2"], "'2' is not one of '1', '3', '5', '7'"),
        (["--publishers", "0"], "0 is not in the range"),
        (["--data", "/none/such.csv"], "neither 'builtin' nor a file or directory that exists"),
        (["--nodes", "1", "--kill-leader"], "--kill-leader needs --nodes 3"),
        (["--what"], "No such option"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_invalid_options_exit_with_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_non_empty_keep_directory_exits_with_2_and_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    result = CliRunner().invoke(demo, ["--data", __file__, "--keep", str(tmp_path)])
    assert (result.exit_code, "is not empty" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_orphans_of_started_processes_are_ended() -> None:
    with nothing_left():
        shell = subprocess.run(
            ["sh", "-c", "sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True, check=True
        )
        orphan = os.pidfd_open(int(shell.stdout))
        assert not select.select([orphan], [], [], 0)[0]
    assert select.select([orphan], [], [], WAIT_S)[0]
    os.close(orphan)


def test_node_log_shows_whether_node_is_leader(tmp_path: Path) -> None:
    log = NodeLog(tmp_path / "n1.log")
    assert (log.last_words(3), log.leads) == ("", 0)
    for text, leads, has_failed in (
        ("process=control logger=sequencer.raft event=became_leader term=3 log_end=7", 3, False),
        ("process=control logger=sequencer.raft event=peer_up peer=n2", 3, False),
        ("process=control logger=sequencer.raft event=stepped_down term=4", 0, False),
        ("process=control logger=sequencer.raft event=became_leader term=5 log_end=9", 5, False),
        ("process=node logger=sequencer.node.supervisor event=child_ended child=data status=70", 5, False),
        (
            "process=node logger=sequencer.node.supervisor event=child_ended child=control signal=SIGKILL",
            0,
            False,
        ),
        ("process=data logger=sequencer.node.child_main event=process_failed status=70 error='x'", 0, True),
    ):
        with log.path.open("a") as file:
            file.write(f"time=2026-01-01T00:00:00.000Z level=info {text}\nhalf a line")
            file.flush()
            log.read()
            file.truncate(file.tell() - len("half a line"))
        assert (log.leads, log.has_failed) == (leads, has_failed), text
    assert log.term == 5
    log.start()
    assert (log.term, log.leads, log.has_failed) == (5, 0, False)
    assert log.last_words(1).endswith("error='x'")
    log.forget_terms()
    assert log.term == 0


def test_leader_is_found_after_node_with_higher_term_is_wiped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a forced reset the leader's term may be lower than a term that the wiped node had logged."""
    nodes = LocalCluster(tmp_path, 3)
    monkeypatch.setattr(nodes, "_running", {"n3": None})
    for name, term in (("n1", 5), ("n3", 3)):
        event = f"process=control logger=sequencer.raft event=became_leader term={term} log_end=7"
        (nodes.root / f"{name}.log").write_text(f"time=2026-01-01T00:00:00.000Z level=info {event}\n")
        nodes.directory(name).mkdir(parents=True)
    assert nodes.leader() is None
    nodes.wipe("n1")
    assert nodes.leader() == "n3"


def test_wait_without_progress_raises_timeout_with_goal_and_log_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "STILL_S_MAX", 0.0)
    monkeypatch.setattr(Demo, "_ask_progress", lambda _: (3, 2, 1))
    monkeypatch.setattr(Demo, "_describe", lambda _: "3 published")
    run = Demo(tmp_path, DemoPlan(1, 1, "builtin", is_leader_killed=False), lambda _: None)
    with pytest.raises(Timeout) as caught:
        run._until(lambda: False, "the subscriber to catch up")
    assert str(caught.value) == (
        f"no progress for 0 s while waiting for the subscriber to catch up (at {tmp_path}): got 3 published. "
        "Run it again with --keep DIR, and look at the logs in that directory."
    )


# With real nodes


@pytest.mark.slow
def test_demo_kills_leader_and_all_verdicts_hold(table: Path, tmp_path: Path) -> None:
    plan, steps = DemoPlan(3, 2, str(table), is_leader_killed=True, steady_s=0.5), list[str]()
    with Demo(tmp_path / "run", plan, steps.append) as run:
        outcome = run.run()
    assert [verdict for verdict in outcome.verdicts if not verdict.holds] == []
    assert len(outcome.verdicts) == 6
    assert outcome.burst.count == 5000
    assert outcome.messages > 5000
    assert outcome.failover is not None
    assert outcome.failover.killed != outcome.failover.took_over
    assert outcome.latency is not None
    assert f"kill -9 {outcome.failover.killed}, which leads" in steps
    assert len(list(summary(outcome))) == 4 + 6


@pytest.mark.slow
def test_flipped_bit_in_merged_log_fails_demo(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    judge = Demo._judge

    def judge_damaged(run: Demo, *arguments: Any) -> list[Verdict]:
        with (kept / "n1" / "demo" / "merged" / "log.0.0").open("r+b") as file:
            file.seek(100_000)
            [byte] = file.read(1)
            file.seek(100_000)
            file.write(bytes([byte ^ 1]))
        return judge(run, *arguments)

    monkeypatch.setattr(Demo, "_judge", judge_damaged)
    result = CliRunner().invoke(
        demo, ["--data", str(table), "--publishers", "1", "--nodes", "1", "--keep", str(kept)]
    )
    assert result.exit_code == 1, result.output
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert ["merged logs byte-identical" in failed[0], "every checksum holds" in failed[1]] == [True, True]
    assert len(failed) == 2
    assert "kept " in result.stdout


@pytest.mark.slow
def test_interrupt_ends_all_processes_and_exits_with_130(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The path must be short: it contains a node's Unix socket.
    scratch = tmp_path_factory.mktemp("t")
    environment = {**os.environ, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "rt", "demo", "--data", str(data), "--publishers", "2"]
    command += ["--nodes", "1"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = [process.stderr.readline() for _ in range(3)]
        assert "for latency" in told[-1], told
        wait(lambda: len(processes_with(f"TMPDIR={scratch}")) >= 1 + 3 + 2 + 2 + 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    assert processes_with(f"TMPDIR={scratch}") == []
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_node_that_cannot_listen_raises_process_ended_with_reason(tmp_path: Path) -> None:
    with (
        LocalCluster(tmp_path, 1) as nodes,
        socket.create_server(("127.0.0.1", nodes.raft_ports["n1"])),
    ):
        nodes.start()
        why = r"(?s)ended by itself \(at n1\).*cannot listen on port \d+ \(--raft-port\)"
        with pytest.raises(ProcessEnded, match=why):
            nodes.wait_ready()
    assert nodes.running == []


@pytest.mark.slow
def test_local_cluster_kills_pauses_wipes_and_restarts_node(tmp_path: Path) -> None:
    """The tests in tests/cluster cover leadership: they have more than one node."""
    before = set(with_parent(os.getpid()))
    with LocalCluster(tmp_path, 1) as nodes:
        nodes.start()
        assert nodes.wait_ready() == "n1"
        for part in PARTS:
            [killed] = nodes.pids("n1", part)
            nodes.kill("n1", part=part)
            nodes.wait(lambda part=part, killed=killed: nodes.pids("n1", part) not in ([], [killed]), part)
        nodes.wait_ready()

        nodes.pause("n1")
        nodes.wait(lambda: all(map(is_still, nodes.pids("n1"))), "all of it to stand still")
        nodes.resume("n1")
        nodes.wait(lambda: not any(map(is_still, nodes.pids("n1"))), "all of it to go on")

        nodes.kill("n1")
        assert (nodes.running, nodes.leader()) == ([], None)
        nodes.wipe("n1")
        assert not nodes.directory("n1").exists()
        nodes.start("n1")
        nodes.wait_ready()
        assert nodes.directory("n1").exists()
        assert nodes.stop() == {"n1": 0}
    # Node processes of other tests may still be ending.
    assert set(with_parent(os.getpid())) <= before


def with_parent(parent: int) -> list[int]:
    """The node processes that `parent` has started."""
    found = []
    for pid in ProcessTable().children(parent):
        with contextlib.suppress(OSError):
            if b"sequencer.localcluster.node_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
