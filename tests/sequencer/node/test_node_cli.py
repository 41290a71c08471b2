"""`rt node`: rejected settings, log lines and exit status, and a real node of one member."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
import sequencer.node.cli
from rt.cli.logging_setup import JsonLines
from rt.cli.main import cli, main
from rt.log.disk import REAL, RealDisk
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity, Role
from sequencer.config.config import ClusterMember, NodeConfig
from sequencer.config.logging_setup import TextLines
from sequencer.config.restart_policy import ExitStatus
from sequencer.localcluster.loopback import free_port
from sequencer.node.cli import node
from sequencer.node.startup_check import check_directories, check_ports
from sequencer.node.supervisor import lock_directory

WAIT_S: Final = 120.0


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the command, and remove the machine's own `RT_` variables."""
    for variable in [name for name in os.environ if name.startswith("RT_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setitem(cli.commands, "node", node)


@pytest.fixture
def logs_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def certified(directory: Path, stream: str = "s", role: Role = "node", name: str = "n1") -> list[str]:
    """Return the flags for a new certificate of a new CA."""
    ca = init_ca(directory)
    issue(directory, Identity(stream, role, name), loopback=role == "node")
    return [
        "--ca",
        str(ca),
        "--cert",
        str(directory / f"{name}.crt"),
        "--key",
        str(directory / f"{name}.key"),
    ]


def arguments(tmp_path: Path, *, raft: int = 7000, data: int = 5002) -> list[str]:
    """Return the flags of a single-node cluster, without those of its certificate."""
    return [
        *("node", "--stream", "s", "--name", "n1", "--directory", str(tmp_path / "node")),
        *("--member", f"n1=127.0.0.1:{raft},127.0.0.1:{data}", "--listen", "127.0.0.1"),
        *("--rest-port", "0", "--health-port", "0", "--bootstrap"),
    ]


# Refusals


def test_missing_or_invalid_settings_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--stream", "s"]) == 2
    assert "settings are missing (at name, directory, members, ca, cert, key)" in capsys.readouterr().err
    assert main([*arguments(tmp_path), "--ca", "c", "--cert", "c", "--key", "k", "--data-port", "x"]) == 2
    captured = capsys.readouterr()
    assert "invalid port (at --data-port): got 'x', expected a whole number from 1 to 65535" in captured.err
    assert captured.out == ""


def test_invalid_environment_variable_is_named_as_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RT_NODE_MEMBERS", "n1=nowhere")
    assert main(["node"]) == 2
    assert "invalid member (at RT_NODE_MEMBERS): got 'n1=nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stream", "role", "name"), [("t", "node", "n1"), ("s", "publisher", "n1"), ("s", "node", "n2")]
)
@pytest.mark.usefixtures("logs_restored")
def test_certificate_of_another_identity_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stream: str, role: Role, name: str
) -> None:
    assert main([*arguments(tmp_path), *certified(tmp_path / "pki", stream, role, name)]) == 1
    error = capsys.readouterr().err
    assert f"the certificate does not name this node (at {tmp_path}/pki/{name}.crt)" in error
    assert f"got rt://{stream}/{role}/{name}, expected rt://s/node/n1" in error
    assert not (tmp_path / "node").exists()


@pytest.mark.usefixtures("logs_restored")
def test_missing_certificate_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = certified(tmp_path / "pki")
    (tmp_path / "pki" / "n1.crt").unlink()
    assert main([*arguments(tmp_path), *flags]) == 1
    assert f"cannot read the file (at {tmp_path}/pki/n1.crt)" in capsys.readouterr().err


@pytest.mark.usefixtures("logs_restored")
def test_directory_locked_by_another_node_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer.node.cli, "supervise", lambda config: pytest.fail("it ran"))
    (tmp_path / "node").mkdir()
    with closing(REAL.lock(str(tmp_path / "node" / "lock"))):
        assert main([*arguments(tmp_path), *certified(tmp_path / "pki")]) == 1
    error = capsys.readouterr().err
    assert f"already in use while locking the node's directory (at {tmp_path}/node/lock)" in error


@pytest.mark.usefixtures("logs_restored")
def test_file_in_place_of_node_directory_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node").touch()
    assert main([*arguments(tmp_path), *certified(tmp_path / "pki")]) == 1
    assert f"(--directory) (at {tmp_path}/node): got a file, expected a directory" in capsys.readouterr().err


@contextmanager
def listening() -> Iterator[int]:
    """Listen on a port in this process."""
    with socket.create_server(("127.0.0.1", free_port())) as other:
        yield int(other.getsockname()[1])


@pytest.mark.parametrize("taken", ["data", "raft"])
@pytest.mark.usefixtures("logs_restored")
def test_port_in_use_exits_with_one_line_naming_port_option_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    monkeypatch.setattr(sequencer.node.cli, "supervise", lambda config: pytest.fail("it ran"))
    monkeypatch.setattr(sequencer.node.cli, "check_ports", partial(check_ports, seconds_max=0.0))
    with listening() as port:
        ports = {"data": free_port(), "raft": free_port(), taken: port}
        assert main([*arguments(tmp_path, **ports), *certified(tmp_path / "pki")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"the node cannot listen on port {port} (--{taken}-port) (at 127.0.0.1)" in line
    assert "Address already in use. Stop the process that has it (`ss -ltnp sport" in line


def config_of(tmp_path: Path, *, listen: str = "127.0.0.1") -> NodeConfig:
    members = {"n1": ClusterMember(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")}
    ports = {"data_port": int(members["n1"].data.split(":")[1]), "raft_port": free_port()}
    files = {"ca": "/ca", "cert": "/cert", "key": "/key"}
    return NodeConfig("s", "n1", str(tmp_path / "node"), members, **files, listen=listen, **ports)


def test_port_check_waits_until_port_of_earlier_node_is_free(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with socket.create_server(("127.0.0.1", config.data_port)) as earlier, ThreadPoolExecutor() as pool:
        checking = pool.submit(check_ports, config, seconds_max=WAIT_S)
        earlier.close()
        checking.result(WAIT_S)


def test_listen_address_of_another_machine_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(rt.RtError, match=r"\(at 192\.0\.2\.1\).*Set --listen to an address of this machine"):
        check_ports(config_of(tmp_path, listen="192.0.2.1"))


def test_unwritable_directory_is_named_with_its_owner(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    check_directories(config)  # No directory exists yet.
    os.makedirs(config.sessions_directory)
    check_directories(config)
    with pytest.raises(rt.StorageError) as caught:
        check_directories(config, may_write=lambda path: path != config.sessions_directory)
    assert f"(at {config.sessions_directory}): got not writable, owned by " in str(caught.value)
    assert "and the node runs as " in str(caught.value)
    assert caught.value.hint == (  # This user is the owner already, so no other owner is suggested.
        "Mount its file system for writing, or give its owner the right to write (`chmod u+rwx`)."
    )


def test_lock_file_without_permission_is_named_in_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(RealDisk, "lock", refuse)
    config = config_of(tmp_path)
    with pytest.raises(rt.StorageError, match=rf"no permission .* \(at {config.lock_file}\)"):
        lock_directory(config)


def test_file_in_place_of_raft_directory_is_rejected(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    os.makedirs(config.directory)
    Path(config.raft_directory).touch()
    with pytest.raises(rt.StorageError, match="got a file, expected a directory"):
        check_directories(config)


def test_dangling_link_in_place_of_directory_is_rejected_with_mount_hint(tmp_path: Path) -> None:
    config, away = config_of(tmp_path), tmp_path / "mnt" / "rt"
    Path(config.directory).symlink_to(away)
    named = rf"got a link to {away}, where no directory is, expected a directory\. Mount the file system"
    with pytest.raises(rt.StorageError, match=named):
        lock_directory(config)
    Path(config.directory).unlink()
    os.makedirs(config.directory)
    Path(config.raft_directory).symlink_to(away)
    with pytest.raises(rt.StorageError, match=named):
        check_directories(config)


@pytest.mark.usefixtures("logs_restored")
def test_node_command_exits_with_supervisor_status_and_locks_directory_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[NodeConfig] = []

    def supervise(config: NodeConfig) -> ExitStatus:
        seen.append(config)
        with pytest.raises(BlockingIOError):
            REAL.lock(config.lock_file)
        return ExitStatus.DIVERGED

    monkeypatch.setattr(sequencer.node.cli, "supervise", supervise)
    before = ["--log-level", "error", "--log-format", "json"]
    flags = arguments(tmp_path, raft=free_port(), data=free_port())
    assert main([*before, *flags, *certified(tmp_path / "pki"), "--log-level", "debug"]) == 71
    [config] = seen
    assert (config.log_level, config.log_format, config.bootstrap) == ("debug", "json", True)
    assert os.stat(config.directory).st_mode & 0o777 == 0o700
    REAL.lock(config.lock_file).close()


# Logs


def record(message: str, *values: object, name: str = "sequencer.raft") -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, "file", 1, message, values, None)
    made.created, made.msecs = 1_700_000_000.5, 500.0
    return made


def test_log_record_of_rt_has_event_as_separate_field() -> None:
    assert TextLines("control").format(record("became_leader term=%d", 3)) == (
        "time=2023-11-14T22:13:20.500Z level=info process=control logger=sequencer.raft "
        "event=became_leader term=3"
    )
    assert json.loads(JsonLines(process="data").format(record("became_leader term=%d", 3))) == {
        "time": "2023-11-14T22:13:20.500Z",
        "level": "info",
        "process": "data",
        "logger": "sequencer.raft",
        "event": "became_leader",
        "message": "became_leader term=3",
    }


def test_log_record_of_another_library_is_one_quoted_message() -> None:
    line = TextLines("data").format(record('some "words"\nof it', name="asyncio"))
    assert line.endswith(r'logger=asyncio message="some \"words\"\nof it"')


def test_log_record_with_exception_stays_on_one_line() -> None:
    made = record("fell error=%r", "x")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    line = TextLines("data").format(made)
    assert "\n" not in line
    assert r"\nZeroDivisionError" in line
    assert json.loads(JsonLines(process="data").format(made))["exception"].endswith("ZeroDivisionError")


@given(st.text(), st.sampled_from(("sequencer", "rt.net", "asyncio", "x\ny")))
def test_log_line_is_printable_for_any_text(text: str, name: str) -> None:
    made = record("refused_peer said=%s", text, name=name)
    for line in (TextLines("node").format(made), JsonLines(process="node").format(made)):
        assert line.isprintable()
    assert json.loads(JsonLines(process="node").format(made))["message"] == f"refused_peer said={text}"


# A whole node

_RUN: Final = """
import sys
from rt.cli.logging_setup import JsonLines
from rt.cli.main import cli, main
from sequencer.node.cli import node
cli.add_command(node)
sys.exit(main())
"""


class Node:
    """A process that runs `rt node`, and its log."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _RUN, *arguments, "--log-format", "json"], stderr=file
            )

    def entries(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the complete log lines of that event so far, with these `fields` or `key=value` in the
        message.
        """
        *lines, _ = self._log.read_text().split("\n")
        found = (json.loads(line) for line in lines)
        return [
            entry
            for entry in found
            if entry["event"] == event
            and all(
                entry.get(key) == value or f" {key}={value}" in entry["message"]
                for key, value in fields.items()
            )
        ]

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds. Fail after a timeout, or if the node ends."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)

    def pids(self, child: str) -> list[int]:
        """Return the pids of all starts of the child."""
        said = (entry["message"] for entry in self.entries("child_started", child=child))
        return [int(found[1]) for message in said if (found := re.search(r"pid=(\d+)", message))]

    def end(self) -> int:
        """Stop the node by SIGTERM, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@contextmanager
def running(arguments: list[str], log: Path) -> Iterator[Node]:
    node = Node(arguments, log)
    try:
        yield node
    finally:
        node.process.kill()
        node.process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_single_node_stops_cleanly_and_restarts_after_kills(tmp_path: Path) -> None:
    raft, data = free_port(), free_port()
    flags = [*arguments(tmp_path, raft=raft, data=data), *certified(tmp_path / "pki")]

    with running(flags, tmp_path / "first") as node:
        node.wait(lambda: node.entries("became_leader", process="control"))
        node.wait(lambda: listens(data) and listens(raft))
        assert node.end() == 0
        assert not listens(data)
        assert [entry["message"] for entry in node.entries("child_ended")] == [
            "child_ended child=data status=0",
            "child_ended child=control status=0",
        ]

    with running(flags, tmp_path / "second") as node:
        node.wait(lambda: node.entries("became_leader") and listens(data))
        again = subprocess.run(
            [sys.executable, "-c", _RUN, *flags], capture_output=True, text=True, check=False
        )
        assert (again.returncode, again.stdout) == (1, "")
        assert "already in use while locking the node's directory" in again.stderr

        [old] = node.pids("control")
        os.kill(old, signal.SIGKILL)
        node.wait(lambda: len(node.pids("control")) == 2 and len(node.entries("became_leader")) == 2)
        assert node.entries("child_ended", child="control", signal="SIGKILL")
        assert len(node.pids("data")) == 1, "the other goes on"

        children = [os.pidfd_open(node.pids(child)[-1]) for child in ("control", "data")]
        node.process.kill()
        node.process.wait()
        for pidfd in children:
            assert select.select([pidfd], [], [], WAIT_S)[0], "children end with their parent"
            os.close(pidfd)

    with running(flags, tmp_path / "third") as node:
        node.wait(lambda: node.entries("became_leader") and listens(data))
        assert node.end() == 0


@pytest.mark.slow
def test_corrupt_raft_identity_ends_node_with_1(tmp_path: Path) -> None:
    flags = [*arguments(tmp_path, raft=free_port(), data=free_port()), *certified(tmp_path / "pki")]
    with running(flags, tmp_path / "first") as node:
        node.wait(lambda: node.entries("became_leader"))
        assert node.end() == 0
    [identity] = (tmp_path / "node" / "raft").glob("identity*")
    content = bytearray(identity.read_bytes())
    content[len(content) // 2] ^= 1
    identity.write_bytes(content)
    with running(flags, tmp_path / "second") as node:
        assert node.process.wait(WAIT_S) == 1
        [failed] = node.entries("process_failed", process="control")
        assert str(identity) in failed["message"]
        assert node.entries("node_failed", child="control")
