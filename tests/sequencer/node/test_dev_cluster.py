"""`rt dev`: its printed programs run, its data survives restarts, and invalid input is rejected."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, pkcs12

import rt
from rt.errors import DirectoryLocked, InvalidOption, RtError
from sequencer.localcluster import dev_cluster
from sequencer.localcluster.cli import dev
from sequencer.localcluster.dev_cluster import DevCluster
from sequencer.localcluster.processes import nothing_left

WAIT_S = 120.0
RUN = "from rt.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def root() -> Iterator[Path]:
    """Yield a directory with a short path, as the sockets of nodes need one."""
    directory = Path(tempfile.mkdtemp(prefix="rt_"))
    yield directory / "d"
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def running(root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `rt dev`. Yield its process and its output up to the moment when the nodes are up. Stop it at the
    end as Ctrl-C does.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "dev", "--nodes", "1", *options],
        cwd=root.parent,
        env={key: value for key, value in os.environ.items() if not key.startswith("RT_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    printed = ""
    try:
        for line in process.stdout:
            printed += line
            if line.startswith("Ctrl-C"):
                break
        else:
            pytest.fail(printed)
        yield process, printed
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, rest
        assert "Stopped." in rest
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def programs(printed: str) -> list[str]:
    """Return the Python programs in the output."""
    found = re.findall(r"\n((?:    .*\n|\n)+)", printed)
    return [textwrap.dedent(text).strip() for text in found if "import rt" in text]


def run_program(text: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", text], check=True, capture_output=True, text=True, timeout=WAIT_S
    ).stdout


def run_shell(url: str, command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        check=True,
        env=os.environ | {"RT_URL": url, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
    ).stdout


@pytest.mark.slow
def test_printed_programs_run_and_messages_survive_restart(root: Path) -> None:
    with nothing_left():
        with DevCluster(root, nodes=1, stream="prices", has_any_ports=True):
            pass  # Other tests may take the usual ports at any moment.
        with running(root, "--directory", "d", "--stream", "prices") as (_, printed):
            publish, subscribe = programs(printed)
            assert subscribe.endswith("subscriber.ack(message.position + 1)")
            receive_one = f"{subscribe}; break"
            run_program(publish)
            assert status_page(printed, root / "pki" / "ops.p12").startswith("HTTP/1.1 200")
        with running(root, "--directory", "d") as (_, again):
            assert again == printed
            assert run_program(receive_one) == "0 greetings b'hello'\n"
            run_program(publish)
            assert run_program(receive_one) == "1 greetings b'hello'\n"
            (url,) = re.findall(r"export RT_URL='(.*)'", printed)
            assert run_shell(url, "echo bye | rt pub && rt sub && rt status").startswith(
                "hello\nhello\nbye\nhealthy"
            )


def status_page(printed: str, p12: Path) -> str:
    """Return the head of the page's response to a browser that has imported the operator's certificate."""
    (port,) = re.findall(r"https://127\.0\.0\.1:(\d+)/", printed)
    pair = pkcs12.load_pkcs12(p12.read_bytes(), None)
    assert pair.cert is not None
    assert pair.key is not None
    pem = p12.with_name("browser.pem")
    key = pair.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    pem.write_bytes(key + pair.cert.certificate.public_bytes(Encoding.PEM))
    context = ssl.create_default_context(cafile=str(p12.with_name("ca.crt")))
    context.load_cert_chain(pem)
    with (
        socket.create_connection(("127.0.0.1", int(port)), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return connection.recv(100).decode()


@pytest.mark.slow
def test_ephemeral_cluster_removes_its_data(root: Path) -> None:
    with nothing_left(), running(root, "--ephemeral") as (_, printed):
        (data,) = re.findall(r"Data \(removed at the end\): (.*)\n", printed)
        assert Path(data).is_dir()
    assert not Path(data).exists()
    assert not root.exists()


@pytest.mark.slow
def test_killed_node_restarts_and_ended_node_does_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev_cluster, "_RESTART_S", 0.1)
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    errors: list[RtError] = []

    def watch(cluster: DevCluster) -> None:
        try:
            cluster.watch(events.put)
        except RtError as error:
            errors.append(error)

    with nothing_left(), DevCluster(root, nodes=1, has_any_ports=True) as cluster:
        cluster.start()
        watching = threading.Thread(target=watch, args=[cluster])
        watching.start()
        killed = cluster.nodes.pids("n1")[0]
        os.kill(killed, signal.SIGKILL)
        assert events.get(timeout=WAIT_S) == "n1 was killed by signal 9. It starts again in 0.1 s"
        assert events.get(timeout=WAIT_S) == "n1 starts again"
        assert cluster.nodes.wait_ready() == "n1"
        assert cluster.nodes.pids("n1")[0] != killed
        os.kill(cluster.nodes.pids("n1")[0], signal.SIGTERM)
        assert events.get(timeout=WAIT_S).startswith("n1 ended with status 0. The end of its log:\n")
        watching.join(WAIT_S)
        assert [str(error).startswith("all nodes have ended") for error in errors] == [True]


def test_directory_accepts_only_its_own_cluster(root: Path) -> None:
    with DevCluster(root, nodes=1, stream="prices") as cluster:
        assert (cluster.nodes.names, cluster.nodes.stream) == (["n1"], "prices")
        with pytest.raises(DirectoryLocked):
            DevCluster(root)
    url = cluster.url
    for other in ({"nodes": 3}, {"stream": "trades"}):
        with pytest.raises(InvalidOption, match=r"another --(nodes|stream).*cluster\.json"):
            DevCluster(root, **other)
    with DevCluster(root, nodes=1) as cluster:
        assert cluster.url == url
        settings = rt.connect(url).settings
        assert settings.endpoints == tuple(cluster.nodes.endpoints)
        assert settings.certificates.find("operator").identity.uri == "rt://prices/operator/ops"
    port = int(settings.endpoints[0].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RtError, match=rf"in use.*:{port}"):
        DevCluster(root)
    (root / "cluster.json").write_text('{"stream": "prices"}')
    with pytest.raises(RtError, match=r"cannot be read.*cluster\.json"):
        DevCluster(root)
    (root / "cluster.json").unlink()
    (root / "cluster.json").symlink_to("/dev/zero")
    with pytest.raises(RtError, match=r"cannot be read.*cluster\.json.*not a regular file"):
        DevCluster(root)
    (root / "cluster.json").unlink()
    (root / "n1" / "raft").mkdir(parents=True)
    with pytest.raises(RtError, match=r"has nodes, and not the settings.*cluster\.json.*got n1"):
        DevCluster(root)


def test_directory_in_place_of_node_log_is_named_in_error(root: Path) -> None:
    (root / "n1.log").mkdir(parents=True)
    result = CliRunner().invoke(dev, ["--directory", str(root), "--nodes", "1"])
    error = result.stderr.splitlines()[1]
    assert error.startswith("rt: this path cannot be used, while opening the log of a node (at ")
    assert f"{root}/n1.log): got EISDIR Is a directory. Choose another path" in error


def test_default_ports_in_use_are_not_chosen(root: Path) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # Another program uses the port already.
            stack.enter_context(socket.create_server(("127.0.0.1", 6002)))
        with DevCluster(root) as cluster:
            assert len({*cluster.nodes.endpoints, cluster.page}) == 4
            assert not any(endpoint.endswith((":5002", ":6002")) for endpoint in cluster.nodes.endpoints)


def test_directory_path_over_length_limit_is_rejected(tmp_path: Path) -> None:
    result = CliRunner().invoke(dev, ["--directory", str(tmp_path / ("x" * 100))])
    assert isinstance(result.exception, InvalidOption)
    assert "at most 88 bytes" in str(result.exception)
    assert not any(tmp_path.iterdir())
