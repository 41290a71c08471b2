"""Failures of real nodes and publishers: kills, network cuts, full disks, bit flips, lost directories.

After each fault, the tests check the same verdict (`support/verdict.py`). Other files test clock jumps,
expired certificates, and power cuts that revert unsynced data.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.wired_nodes import CLIENTS, WiredNodes
from faults import WAIT_S, Faults
from preloaded import FSYNC, built
from senders import Sender

import rt
from rt.log.check.status import read_status
from rt.log.disk import REAL
from rt.log.scan.directory import read_durable_end, read_identity
from rt.net.dev_pki import issue
from rt.net.identity import Identity
from rt.sidecar.progress_file import PushState, read_progress
from sequencer.localcluster.nodes import Part

pytestmark = pytest.mark.slow

DAMAGE = "checksum|[Dd]amage|starts here|session_replica_failed"
"""Log texts about a flipped bit. The offset of the bit determines how a node detects it."""

DAMAGED_AT = 6000
PARTS: tuple[Part, ...] = ("control", "data")


# --- publishers -------------------------------------------------------------------------------------------


def test_killed_publisher_continues_without_gap_or_repeat(faults: Faults) -> None:
    with faults.sender("killed") as sender:
        for _ in range(2):
            faults.wait_flow(sender)
            sender.kill()
            sender.start()
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_replicated_messages_survive_loss_of_session_directory(faults: Faults) -> None:
    with faults.sender("lost") as sender:
        for _ in range(2):
            faults.wait(lambda: sender.notes.replicated > sender.notes.first + 50, "something replicated")
            sender.lose()
            sender.start()
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_publisher_on_session_directory_restored_from_copy_raises_fenced(
    faults: Faults, tmp_path: Path
) -> None:
    """The copy's next run repeats the run number and the message numbers of a run that the cluster has
    merged.
    """
    root, copy, session = tmp_path / "root", tmp_path / "copy", "restored"
    tls = faults.nodes.certificate("publisher", session)

    def opened(path: Path) -> rt.Publisher:
        return rt.Publisher(path, "s", publisher_id=session, endpoints=faults.nodes.endpoints, tls=tls)

    with opened(root) as publisher:
        publisher.wait(publisher.publish(b"first"), "merged", timeout=WAIT_S)
    shutil.copytree(root, copy)
    with opened(root) as publisher:
        publisher.wait(publisher.publish(b"later"), "merged", timeout=WAIT_S)
    with opened(copy) as publisher:
        number = publisher.publish(b"other")
        with pytest.raises(rt.Fenced, match="another run id"):
            publisher.wait(number, "merged", timeout=WAIT_S)
        with pytest.raises(rt.Fenced, match="restored from a copy, begin a new one"):
            publisher.close()
    with opened(tmp_path / "new") as publisher:
        publisher.wait(publisher.publish(b"again"), "merged", timeout=WAIT_S)
    faults.verdict(others={session: 3})


def test_second_host_with_same_session_name_fences_first(faults: Faults) -> None:
    with faults.sender("twin", host="first") as first:
        faults.wait_flow(first)
        with Sender(
            first.root.parent / "second",
            "twin",
            faults.nodes.endpoints,
            faults.nodes.certificate("publisher", "twin"),
        ) as second:
            faults.wait(lambda: first.notes.ended_by, "one of them to be told")
            assert first.notes.ended_by == "Fenced"
            faults.wait_flow(second)
            second.close()
            # Both count as one name with two incarnations, as if the second host had lost the directory of
            # the first.
            second.lives[-1].incarnation = 1
            second.lives[:0] = first.lives
            faults.senders[:] = [second]
            faults.verdict()


@pytest.mark.parametrize("cut", ["none", "silence"])
def test_idle_publisher_is_fenced_when_another_directory_takes_its_name_on_other_nodes(
    faults: Faults, tmp_path: Path, cut: str
) -> None:
    """The older publisher sends nothing, and the newer one opens no stream to the node of the older one."""
    nodes, session = faults.nodes, f"idle-{cut}"
    tls, (first, *others) = nodes.certificate("publisher", session), nodes.endpoints
    one, other = tmp_path / "one", tmp_path / "other"
    with rt.Publisher(one, "s", publisher_id=session, endpoints=[first], tls=tls) as older:
        older.wait(older.publish(b"older"), "merged", timeout=WAIT_S)
        if cut == "silence":
            nodes.silence(CLIENTS)
        with rt.Publisher(other, "s", publisher_id=session, endpoints=others, tls=tls) as newer:
            nodes.heal(CLIENTS)
            newer.wait(newer.publish(b"newer"), "merged", timeout=WAIT_S)
            faults.wait(
                lambda: getattr(read_progress(older.directory), "state", None) is PushState.FENCED,
                "the older one to be told, though it says nothing",
            )
            with pytest.raises(rt.Fenced):
                older.wait(older.publish(b"more"), "replicated", timeout=WAIT_S)
            newer.wait(newer.publish(b"again"), "merged", timeout=WAIT_S)
        with contextlib.suppress(rt.Fenced):
            older.close(timeout=0)
    faults.verdict(others={session: 3})


def test_publisher_on_full_disk_raises_disk_full_and_continues_once_space_is_freed(
    faults: Faults, mounted: Callable[[Path, int], None], tmp_path: Path
) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mounted(disk, 2**20)
    with rt.Publisher(
        disk,
        "s",
        publisher_id="full",
        endpoints=faults.nodes.endpoints,
        tls=faults.nodes.certificate("publisher", "full"),
    ) as publisher:
        publisher.wait(publisher.publish(b"before"), "merged", timeout=WAIT_S)
        # The push process runs by now. While it starts, it would hold the files that are open at that moment.
        ballast = disk / "ballast"
        fill(ballast)
        with pytest.raises(rt.DiskFull):
            while True:
                publisher.publish_many([b"x" * 1000] * 10)
                publisher.flush()
        taken = publisher.next_number
        with pytest.raises(rt.DiskFull):
            publisher.publish(b"refused")
        ballast.unlink()
        assert publisher.publish(b"after") == taken
        publisher.flush()
        publisher.wait(taken, "merged", timeout=WAIT_S)
    faults.verdict(others={"full": taken + 1})
    with rt.LogReader(faults.nodes.merged_directory("n1"), topics=[""]) as reader:
        numbers = [(message.number, message.value[:6]) for message in reader if message.session == "full"]
    assert [number for number, _ in numbers] == list(range(taken + 1))
    assert numbers[0][1] == b"before"
    assert numbers[-1][1] == b"after"


def test_publishers_keep_publishing_while_no_node_is_reachable_and_flow_resumes(faults: Faults) -> None:
    with faults.sender("alone") as kept, faults.sender("alone2") as restarted:
        faults.wait_flow(kept, restarted)
        faults.nodes.cut(CLIENTS)
        cut_at = kept.notes.flushed
        faults.wait(lambda: kept.notes.flushed > cut_at + 500, "publishing to go on")
        restarted.kill()
        restarted.start()
        faults.wait(lambda: restarted.notes.flushed > restarted.notes.first + 200, "publishing to go on")
        faults.nodes.heal(CLIENTS)
        faults.wait_flow(kept, restarted)
        kept.close()
        restarted.close()
        faults.verdict()


# --- nodes ------------------------------------------------------------------------------------------------


def killed(nodes: WiredNodes, name: str) -> Callable[[], None]:
    nodes.kill(name)
    return lambda: nodes.start(name)


def paused(nodes: WiredNodes, name: str) -> Callable[[], None]:
    nodes.pause(name)
    return lambda: nodes.resume(name)


def cut_off(nodes: WiredNodes, name: str) -> Callable[[], None]:
    nodes.cut(name)
    return lambda: nodes.heal(name)


def silent(nodes: WiredNodes, name: str) -> Callable[[], None]:
    nodes.silence(name)
    return lambda: nodes.heal(name)


Fault = Callable[[WiredNodes, str], Callable[[], None]]


@pytest.mark.parametrize("who", ["leader", "follower"])
@pytest.mark.parametrize("fault", [killed, paused, cut_off, silent])
def test_stream_flows_without_one_node_and_node_catches_up(faults: Faults, fault: Fault, who: str) -> None:
    leader = faults.nodes.wait_ready()
    name = leader if who == "leader" else next(name for name in faults.nodes.names if name != leader)
    with faults.sender(f"{fault.__name__}-{who}") as sender:
        faults.wait_flow(sender)
        heal = fault(faults.nodes, name)
        faults.wait_flow(sender)
        heal()
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()


@pytest.mark.parametrize("part", PARTS)
def test_stream_flows_after_one_process_of_each_node_is_killed_in_turn(faults: Faults, part: Part) -> None:
    with faults.sender(f"part-{part}") as sender:
        faults.wait_flow(sender)
        for name in faults.nodes.names:
            faults.nodes.kill(name, part=part)
            faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_stream_flows_after_same_process_of_all_nodes_is_killed_at_once(faults: Faults) -> None:
    with faults.sender("parts") as sender:
        faults.wait_flow(sender)
        for part in PARTS:
            faults.nodes.kill(*faults.nodes.names, part=part)
            faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_node_unreachable_by_publisher_keeps_up(faults: Faults) -> None:
    nodes, session = faults.nodes, "out-of-reach"
    tls = nodes.certificate("publisher", session)
    with Sender(nodes.root / session, session, nodes.endpoints[:2], tls) as sender:
        faults.senders.append(sender)
        for _ in range(3):
            faults.wait_flow(sender)
            nodes.wait_merged(max(map(nodes.merged_position, nodes.names)), "n3")
        sender.close()
        faults.verdict()


def test_replicated_messages_survive_kill_of_all_nodes_at_once(faults: Faults) -> None:
    with faults.sender("all") as sender:
        faults.wait_flow(sender)
        faults.nodes.kill(*faults.nodes.names)
        faults.nodes.start()
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_node_with_wiped_disk_joins_again_with_identical_bytes(faults: Faults) -> None:
    with faults.sender("wiped") as sender:
        faults.wait_flow(sender)
        leader = faults.nodes.wait_ready()
        faults.nodes.kill(leader)
        faults.nodes.wipe(leader)
        faults.wait_flow(sender)
        faults.nodes.start(leader)
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_node_with_full_disk_catches_up_once_space_is_freed(
    faults: Faults, mounted: Callable[[Path, int], None]
) -> None:
    nodes = faults.nodes
    name = next(name for name in nodes.names if name != nodes.wait_ready())
    with faults.sender("nodefull") as sender:
        faults.wait_flow(sender)
        nodes.kill(name)
        nodes.wipe(name)
        nodes.directory(name).mkdir()
        mounted(nodes.directory(name), 48 * 2**20)
        nodes.start(name)
        nodes.wait_merged(nodes.merged_position(nodes.running[0]), name)
        ballast = nodes.directory(name) / "ballast"
        fill(ballast)
        faults.wait_flow(sender)
        position = nodes.merged_position(next(other for other in nodes.names if other != name))
        faults.wait_flow(sender)
        ballast.unlink()
        nodes.wait_merged(position, name)
        faults.wait_flow(sender)
        sender.close()
        try:
            faults.verdict(allowed=[r"No space left", r"disk.full|disk is full"])
        finally:
            nodes.stop(name)  # Its directory is on the mount: the next test finds it empty.


def test_node_process_ends_on_failed_fsync_and_is_restarted(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger = tmp_path / "fail"
    monkeypatch.setenv("LD_PRELOAD", str(built(tmp_path, "fsync", FSYNC)))
    monkeypatch.setenv("FSYNC_FAILS_ONCE_IF", str(trigger))
    nodes = faults.nodes
    name = nodes.names[1]
    nodes.stop(name)
    nodes.start(name)
    monkeypatch.undo()
    nodes.wait_ready()
    with faults.sender("fsync") as sender:
        for _ in range(3):
            before = set(nodes.pids(name))
            faults.wait_flow(sender)
            trigger.touch()
            faults.wait(lambda: not trigger.exists(), "an fsync to fail")
            faults.wait(
                lambda before=before: (now := set(nodes.pids(name))) != before and len(now) == len(before),
                "what it failed in to end, and to start again",
            )
        faults.wait_flow(sender)
        sender.close()
        why = [line for line in faults.said(name) if "event=process_failed" in line]
        assert len(why) == 3, why
        assert all("Input/output error" in line for line in why), why
        faults.verdict(allowed=[r"Input/output error", r"level=critical .*(fsync|sync)"])
        nodes.stop(name)  # The next test starts it without the library.


def test_bit_flip_in_session_replica_reaches_no_merged_log(faults: Faults) -> None:
    name = faults.nodes.names[2]
    with faults.sender("flip-copy") as sender:
        faults.wait_flow(sender)
        segment = damage(faults, name, "sessions")
        faults.nodes.start(name)
        faults.wait(
            lambda: fixed(faults, name) or not segment.exists() or segment.stat().st_size == 0,
            "the damage to be fixed, or to be merged by then and let go",
        )
        faults.wait_flow(sender)
        sender.close()
        # Peers may have deleted messages that were merged meanwhile, and refuse to send them.
        faults.verdict(allowed=[DAMAGE + "|segment_repair_failed"])


def test_bit_flip_in_session_replica_between_receipt_and_merge_is_not_merged(
    faults: Faults, tmp_path: Path
) -> None:
    """The node holds the messages that the other nodes merged. It learns of the merge only after the flip."""
    nodes, session = faults.nodes, "flip-between"
    faults.wait(nodes.leader, "a leader")
    leader = nodes.leader()
    name = next(name for name in nodes.names if name != leader)
    tls = nodes.certificate("publisher", session)
    values = [b"%d:" % number + bytes([number]) * 3000 for number in range(200)]
    position = max(map(nodes.merged_position, nodes.names))
    with rt.Publisher(tmp_path, "s", publisher_id=session, endpoints=nodes.endpoints, tls=tls) as publisher:
        publisher.wait(publisher.publish(b"first"), "merged", timeout=WAIT_S)
        nodes.wait_merged(position + 1)
        nodes.pause(name, part="control")
        last = publisher.publish_many(values)[-1]
        publisher.wait(last, "merged", timeout=WAIT_S)
        faults.wait(lambda: held(nodes, name, session) > last, "the node to hold it")
        (copy,) = [
            path
            for path in (nodes.directory(name) / nodes.stream / "sessions").glob("*/")
            if read_identity(REAL, str(path)).name == session
        ]
        assert nodes.merged_position(name) == position + 1
        flip(copy / "log.0.0")
        nodes.resume(name, part="control")
        nodes.wait_merged(position + 1 + len(values), name)
    with rt.LogReader(nodes.merged_directory(name), position=position + 1) as log:
        assert [message.value for message in log] == values
    assert any("segment_corrupt" in line and "sessions" in line for line in faults.said(name))
    faults.verdict(allowed=[DAMAGE, "segment_repair_failed"], others={session: len(values) + 1})


def test_bit_flip_in_merged_log_of_running_node_is_found_and_repaired(faults: Faults) -> None:
    name = faults.nodes.names[2]
    with faults.sender("flip-running") as sender:
        faults.wait_flow(sender)
        found: list[Path] = []

        def is_found() -> bool:
            found[:] = filter(None, [synced_segment(faults.nodes, name, "merged")])
            return bool(found)

        faults.wait(is_found, "enough to be damaged")
        flip(found[0])
        faults.wait(lambda: fixed(faults, name), "the damage to be fixed")
        faults.wait_flow(sender)
        sender.close()
        faults.verdict(allowed=[DAMAGE])


def test_bit_flip_in_active_merged_segment_is_repaired_after_node_restart(
    faults: Faults,
) -> None:
    name = faults.nodes.names[2]
    with faults.sender("flip-active") as sender:
        faults.wait_flow(sender)
        damage(faults, name, "merged")
        faults.nodes.start(name)
        faults.wait(lambda: fixed(faults, name), "the damage to be fixed")
        faults.wait_flow(sender)
        sender.close()
        faults.verdict(allowed=[DAMAGE])


def test_messages_of_lost_publisher_held_by_one_node_are_copied_and_merged(faults: Faults) -> None:
    nodes, session = faults.nodes, "orphan"
    tls = nodes.certificate("publisher", session)
    with Sender(nodes.root / "orphaned", session, nodes.endpoints[:1], tls) as sender:
        faults.wait(lambda: held(nodes, "n1", session) > 100, "one node to hold something")
        sender.lose()
    faults.wait(
        lambda: merged_of(nodes, "n2", session) == list(range(held(nodes, "n1", session))),
        "what the node holds to be merged",
    )
    faults.verdict()


def test_certificates_are_rotated_while_streams_flow(faults: Faults) -> None:
    nodes = faults.nodes
    with faults.sender("rotated") as sender:
        faults.wait_flow(sender)
        pki = nodes.root / "pki"
        for name in nodes.names:
            issue(pki, Identity("s", "node", name), loopback=True, renew=True)
        tls = nodes.certificate("publisher", "rotated", renew=True)
        nodes.reset()
        faults.wait_flow(sender)
        for name in nodes.names:
            assert shown_by(nodes.data_ports[name], tls) == (pki / f"{name}.crt").read_text()
        sender.close()
        faults.verdict()


# --- tools ------------------------------------------------------------------------------------------------


@pytest.fixture
def mounted() -> Iterator[Callable[[Path, int], None]]:
    """Return `mounted(directory, size_bytes)`, which mounts a small file system there for the time of the
    test.
    """
    done: list[Path] = []

    def mount(directory: Path, size_bytes: int) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "rt-test", directory]
        result = subprocess.run(command, check=False, capture_output=True)
        if result.returncode:
            pytest.skip(f"no file system can be mounted here: {result.stderr!r}")
        done.append(directory)

    yield mount
    for directory in done:
        subprocess.run(["umount", "-l", directory], check=True)
        shutil.rmtree(directory)


def fill(path: Path) -> None:
    """Fill all free space."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)


def damage(faults: Faults, name: str, where: str) -> Path:
    """Kill a node and flip a synced bit in the newest segment of its merged log, or of a session copy."""
    found: Path | None = None
    while found is None:
        faults.wait(lambda: synced_segment(faults.nodes, name, where), "enough to be damaged")
        faults.nodes.kill(name)
        found = synced_segment(faults.nodes, name, where)
        if found is None:  # The segment was rolled meanwhile.
            faults.nodes.start(name)
    flip(found)
    return found


def flip(segment: Path) -> None:
    with segment.open("r+b") as file:
        file.seek(DAMAGED_AT)
        (byte,) = file.read(1)
        file.seek(DAMAGED_AT)
        file.write(bytes([byte ^ 4]))


def fixed(faults: Faults, name: str) -> bool:
    """Return whether the node logged a repair, or a replica set aside, since the test started."""
    said = "\n".join(faults.said(name))
    return "event=segment_repaired" in said or "replica was set aside" in said


def held(nodes: WiredNodes, name: str, session: str) -> int:
    """One past the last number that a node has of a session."""
    for copy in (nodes.directory(name) / nodes.stream / "sessions").glob("*/"):
        with contextlib.suppress(rt.LogNotFound):  # The copy is just being created.
            if read_identity(REAL, str(copy)).name == session:
                return read_status(copy).end
    return 0


def merged_of(nodes: WiredNodes, name: str, session: str) -> list[int]:
    """The numbers of a session that a node has merged."""
    with rt.LogReader(nodes.merged_directory(name)) as reader:
        return [message.number for message in reader if message.session == session]


def synced_segment(nodes: WiredNodes, name: str, where: str) -> Path | None:
    """The segment that was synced last, if it is active and synced well beyond `DAMAGED_AT`."""
    with contextlib.suppress(FileNotFoundError):  # Merged messages may be deleted meanwhile.
        ends = (nodes.directory(name) / nodes.stream / where).rglob("durable")
        newest = max(((path.stat().st_mtime_ns, path.parent) for path in ends), default=None)
        durable = None if newest is None else read_durable_end(REAL, str(newest[1]))
        if newest is not None and durable is not None and durable.offset > DAMAGED_AT + 4096:
            segment = newest[1] / durable.id.file_name
            return segment if segment.stat().st_size >= durable.offset else None
    return None


def shown_by(port: int, tls: rt.TLS) -> str:
    """Return the certificate that a port shows to clients, as PEM."""
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        return ssl.DER_cert_to_PEM_cert(shown)
