"""Real Raft nodes under kills, pauses, partitions, wipes and power cuts; the checks of their guarantees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from chaos.checks import NO_CHAIN, check_lives
from chaos.cluster import Cluster
from chaos.power import UndoableDisk
from chaos.power_cut import cut_power
from chaos.run import Chaos
from disks import MemoryDisk
from hypothesis import given
from hypothesis import strategies as st

from rt.errors import RtError
from rt.log.disk import Disk
from sequencer.localcluster.processes import Process, ProcessEnded

# --- clusters


FAULTS = {"kill", "power", "pause", "cut", "hold", "delay", "reset", "hand_over", "wipe"}


def run_chaos(root: Path, *, nodes: int, strikes: int, seed: int) -> set[str]:
    """Run a chaos test, and return the kinds of faults that occurred."""
    outcome = Chaos(root, nodes=nodes, strikes=strikes, rest_s_max=0.7, seed=seed, say=said).run()
    said(str(outcome))
    assert not outcome.problems, outcome
    assert outcome.verdict.commands >= outcome.verdict.acknowledged > 0
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        assert str(root) not in command_line(pid)
    return set(outcome.faults)


def said(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_cluster_of_three_keeps_guarantees_under_all_kinds_of_faults(tmp_path: Path) -> None:
    """The seed draws each kind at least twice. `python -m chaos.run` runs longer."""
    assert run_chaos(tmp_path, nodes=3, strikes=24, seed=11) >= FAULTS


@pytest.mark.slow
def test_cluster_of_five_keeps_guarantees_under_faults(tmp_path: Path) -> None:
    assert run_chaos(tmp_path, nodes=5, strikes=14, seed=3) > {"kill", "power", "pause"}


@pytest.mark.slow
def test_repeated_leadership_transfers_under_load_lose_no_commands(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, seed=5) as cluster:
        for name in cluster.names:
            cluster.start(name)
        wait_for(lambda: all(status["index"] > 200 for status in cluster.statuses()))
        for _ in range(8):
            wait_for(lambda: is_handed_over(cluster))
            reached = max(status["index"] for status in cluster.statuses())
            wait_for(lambda: all(status["index"] > reached for status in cluster.statuses()))  # noqa: B023
        for process in cluster.running.values():
            process.ask("quiet")
        wait_for(lambda: {status["in_flight"] for status in cluster.statuses()} == {0})
        wait_for(lambda: len({status["hash"] for status in cluster.statuses()}) == 1)
        assert [process.terminate(60) for process in cluster.running.values()] == [0, 0, 0]
        cluster.running.clear()
        assert any(
            "timeout_now_received" in (cluster.out(name) / "stderr").read_text() for name in cluster.names
        )
    assert not check_lives({name: cluster.out(name) for name in cluster.names}, is_settled=True).problems


def is_handed_over(cluster: Cluster) -> bool:
    leader = cluster.running.get(cluster.statuses()[0]["leader"] or "")
    return leader is not None and leader.ask("hand_over", seconds=5.0)["is_led_by_another"] is True


@pytest.mark.slow
def test_unsynced_raft_log_is_detected_after_power_cut(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, seed=4, lies_about=["log."]) as cluster:
        for name in cluster.names:
            cluster.start(name)
        wait_for(lambda: all(status["index"] > 200 for status in cluster.statuses()))
        cluster.cut_power(cluster.names, "none", 0)
        before = check_lives({name: cluster.out(name) for name in cluster.names}, is_settled=False)
        assert before.acknowledged
        assert not before.problems
        try:
            for name in cluster.names:
                cluster.start(name)
            wait_for(lambda: all(status["index"] > before.commands for status in cluster.statuses()))
        except ProcessEnded:
            return  # A node itself detected that the state of its disk is impossible.
    assert check_lives({name: cluster.out(name) for name in cluster.names}, is_settled=False).problems


def wait_for(is_met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- processes

CHILD = (
    "from sequencer.localcluster.processes import serve\n"
    "serve(lambda do, arguments: {'said': do, **arguments})"
)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Process]:
    (tmp_path / "child_of_test.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    return lambda: Process("child_of_test", {}, tmp_path / "stderr")


def test_process_answers_and_exits_with_0_on_sigterm(child: Callable[[], Process]) -> None:
    with child() as process:
        assert process.ask("this", value=1) == {"said": "this", "value": 1}
        assert process.terminate(60) == 0


def test_process_answer_to_earlier_request_is_dropped(child: Callable[[], Process]) -> None:
    with child() as process:
        process.post("first")
        assert process.ask("second") == {"said": "second"}


def test_process_killed_by_signal_raises_process_ended_with_status(
    tmp_path: Path, child: Callable[[], Process]
) -> None:
    with child() as process:
        assert process.ask("begun")
        process.signal(signal.SIGKILL)
        with pytest.raises(ProcessEnded, match="status -9"):
            process.ask("anything")


@pytest.mark.parametrize("moment", ["running", "stopped"])
def test_process_ends_when_its_parent_is_killed(
    tmp_path: Path, child: Callable[[], Process], moment: str
) -> None:
    parent = (
        "import os, pathlib; from sequencer.localcluster.processes import Process\n"
        f"process = Process('child_of_test', {{}}, pathlib.Path({str(tmp_path / 'stderr')!r}))\n"
        f"process.ask('begun'); {'process.signal(19)' if moment == 'stopped' else 'pass'}\n"
        "print(process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    wait_for(lambda: "child_of_test" not in command_line(pid))


# --- power


@pytest.fixture(scope="module")
def _syncs_take_no_time() -> Iterator[None]:
    with mock.patch("os.fsync"), mock.patch("os.fdatasync"):
        yield


class Both:
    """The same changes on a real directory that can lose power, and on a `MemoryDisk`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory = MemoryDisk()
        self.memory.make_directory("/files")
        (root / "files").mkdir()
        self.begin_life()

    def begin_life(self) -> None:
        real = UndoableDisk(str(self.root / "journal"))
        self.disks: list[tuple[str, Disk]] = [(str(self.root / "files"), real), ("/files", self.memory)]

    def do(self, change: tuple[object, ...]) -> None:
        errors = []
        for prefix, disk in self.disks:
            try:
                make(disk, prefix, *change)  # type: ignore[arg-type]
            except OSError as error:
                errors.append(error.errno)
        assert len(set(errors)) <= 1
        assert len(errors) in {0, 2}

    def left(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.root / "files").iterdir()}

    def expected(self) -> dict[str, bytes]:
        memory = self.memory.after_power_cut("none")
        return {os.path.basename(path): memory.read(path) for path in memory.paths()}


def make(disk: Disk, prefix: str, kind: str, name: str, other: str, offset: int, size: int) -> None:
    path = f"{prefix}/{name}"
    match kind:
        case "create":
            disk.create(path).close()
        case "rename":
            disk.rename(path, f"{prefix}/{other}")
        case "remove":
            disk.remove(path)
        case "directory":
            disk.sync_directory(prefix)
        case _:
            file = disk.open(path, write=True)
            try:
                if kind == "write":
                    file.pwritev([bytes([65 + offset % 26]) * size, b"|"], offset)
                elif kind == "truncate":
                    file.truncate(offset)
                else:
                    file.sync()
            finally:
                file.close()


CHANGE = st.tuples(
    st.sampled_from(
        ["create", "write", "write", "sync", "directory", "truncate", "rename", "remove", "life"]
    ),
    st.sampled_from("abc"),
    st.sampled_from("abc"),
    st.integers(0, 1500),
    st.integers(1, 1500),
)


@pytest.mark.usefixtures("_syncs_take_no_time")
@given(changes=st.lists(CHANGE, max_size=30))
def test_power_cut_reverts_unsynced_changes_only(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[object, ...]]
) -> None:
    both = Both(tmp_path_factory.mktemp("power"))
    for change in changes:
        if change[0] == "life":
            both.begin_life()
        elif change[0] != "rename" or change[1] != change[2]:
            both.do(change)
    cut_power(str(both.root / "files"), str(both.root / "journal"), "none")
    assert both.left() == both.expected()
    assert os.listdir(both.root / "journal") == []


@pytest.mark.usefixtures("_syncs_take_no_time")
@given(changes=st.lists(CHANGE, max_size=30), seed=st.integers(0, 2**32))
def test_power_cut_keeps_synced_files_for_any_unsynced_remainder(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[object, ...]], seed: int
) -> None:
    both = Both(tmp_path_factory.mktemp("power"))
    for name in "abc":
        both.do(("create", name, "", 0, 1))
    both.do(("directory", "a", "", 0, 1))
    for change in changes:
        if change[0] in {"write", "truncate"}:
            both.do(change)
    for name in "ab":
        both.do(("sync", name, "", 0, 1))
    synced = both.left()
    for change in changes:
        if change[0] in {"write", "truncate"} and change[1] == "c":
            both.do(change)
    cut_power(str(both.root / "files"), str(both.root / "journal"), "some", seed)
    left = both.left()
    assert {name: left[name] for name in "ab"} == {name: synced[name] for name in "ab"}


def test_power_cut_ignores_torn_journal_record(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.do(("create", "a", "", 0, 1))
    both.do(("directory", "a", "", 0, 1))
    both.do(("write", "a", "", 0, 10))
    both.do(("sync", "a", "", 0, 1))
    journal = tmp_path / "journal" / "journal"
    with journal.open("ab") as file:
        file.write(journal.read_bytes()[:20])
    cut_power(str(tmp_path / "files"), str(tmp_path / "journal"), "none")
    assert both.left() == {"a": b"A" * 10 + b"|"}


# --- checks: they find each wrong line


def lives_of(root: Path) -> dict[str, Path]:
    """Write the output of two nodes. The first node had two runs, and skipped ahead in the second run."""
    texts = {
        "n1/applied.1": f"restore 0 {NO_CHAIN}\n1 n1.1.0.1 c1\n2 n2.1.0.1 c2\n3 n1.1",
        "n1/acked.1": "1 n1.1.0.1\n",
        "n1/applied.2": "restore 1 c1\n2 n2.1.0.1 c2\nrestore 3 c3\n4 n1.2.0.1 c4\n",
        "n1/acked.2": "4 n1.2.0.1\n",
        "n2/applied.1": f"restore 0 {NO_CHAIN}\n1 n1.1.0.1 c1\n2 n2.1.0.1 c2\n3 n2.1.0.2 c3\n4 n1.2.0.1 c4\n",
        "n2/acked.1": "2 n2.1.0.1\n3 n2.1.0.2\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return {"n1": root / "n1", "n2": root / "n2"}


def test_valid_run_records_pass_check_and_are_counted(tmp_path: Path) -> None:
    verdict = check_lives(lives_of(tmp_path))
    assert verdict.problems == []
    assert (verdict.commands, verdict.acknowledged, verdict.lives, verdict.installs) == (4, 4, 3, 1)


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("n2/applied.1", "3 n2.1.0.2 c3", "3 n2.1.0.2 cX", "another state"),
        ("n2/applied.1", "2 n2.1.0.1 c2", "2 n2.1.0.7 c2", "elsewhere n2.1.0.1"),
        ("n2/applied.1", "2 n2.1.0.1 c2\n", "", "applied command 3 behind 1"),
        ("n2/applied.1", "2 n2.1.0.1 c2\n", "2 n2.1.0.1 c2\n2 n2.1.0.1 c2\n", "applied command 2 behind 2"),
        ("n2/applied.1", "3 n2.1.0.2 c3", "3 n1.1.0.1 c3", "command 3 is n1.1.0.1, not number 2 of n1.1.0"),
        ("n2/applied.1", "3 n2.1.0.2 c3", "3 n2.1.0.3 c3", "not number 2 of n2.1.0"),
        ("n2/applied.1", "4 n1.2.0.1 c4\n", "", "n2 ended at command 3, not 4"),
        ("n2/applied.1", "3 n2.1.0.2 c3\n4 n1.2.0.1 c4\n", "", "1 commands were never applied"),
        ("n1/applied.2", "restore 1 c1", "restore 1 c2", "another state"),
        ("n1/applied.2", "restore 3 c3", "restore 1 c1", "rolled back from command 2 to 1"),
        ("n1/acked.1", "1 n1.1.0.1", "1 n1.1.0.2", "n1.1.0.2 was acknowledged as command 1"),
        ("n1/acked.1", "1 n1.1.0.1", "2 n1.1.0.1", "n1.1.0.1 was acknowledged as command 2"),
        ("n1/acked.1", "1 n1.1.0.1", "9 n1.1.0.9", "which is nothing"),
        ("n1/acked.1", "1 n1.1.0.1\n", "1 n1.1.0.1\n1 n1.1.0.1\n", "acknowledged twice"),
    ],
)
def test_broken_guarantee_in_run_records_is_reported(
    tmp_path: Path, file: str, old: str, new: str, problem: str
) -> None:
    directories = lives_of(tmp_path)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    problems = check_lives(directories).problems
    assert any(problem in found for found in problems), problems


def test_chaos_run_fails_with_error_of_nodes_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos.cluster.STREAM", "not a name")
    with pytest.raises(RtError, match="not a name"):
        Chaos(tmp_path, strikes=1, seed=1).run()
