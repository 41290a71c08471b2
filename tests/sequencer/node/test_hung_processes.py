"""A paused process of a single node is reported by its log, its probes, `rt status` and systemd."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from service_manager import ServiceManager

from rt.cli.commands.status import status
from sequencer.localcluster.nodes import LocalCluster

pytestmark = pytest.mark.slow

PROBE_S: Final = 20.0
"""Longer than the silence after which a process counts as hung."""


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceManager]:
    with ServiceManager() as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.name)
        monkeypatch.setenv("WATCHDOG_USEC", "4000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield systemd


@pytest.fixture
def node(systemd: ServiceManager) -> Iterator[LocalCluster]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with LocalCluster(root, 1, with_rest=True) as nodes:
            nodes.start()
            nodes.wait(lambda: "READY=1" in systemd.read(), "the node to be up")
            nodes.wait(lambda: probe(nodes, "/readiness") == (200, []), "the node to be ready")
            nodes.wait(lambda: probe(nodes, "/liveness") == (200, []), "the node to be alive")
            yield nodes
    finally:
        shutil.rmtree(root)


def probe(node: LocalCluster, path: str) -> tuple[int, list[str]]:
    """Return the HTTP status and the obstacles. Return (0, []) on an `OSError`: a process may accept the
    connection just before it is stopped.
    """
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{node.health_ports['n1']}{path}", timeout=PROBE_S
        ) as answer:
            return answer.status, json.load(answer)["obstacles"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["obstacles"]
    except OSError:
        return 0, []


def failed(node: LocalCluster, path: str) -> list[str]:
    """Wait until the probe fails, and return its obstacles."""
    found: list[str] = []

    def fails() -> bool:
        code, found[:] = probe(node, path)
        return code == 503

    node.wait(fails, f"{path} to fail")
    return found


def test_paused_data_process_is_reported_by_probes_systemd_status_command_and_log(
    node: LocalCluster, systemd: ServiceManager
) -> None:
    (pid,) = node.pids("n1", "data")
    node.pause("n1", "data")
    try:
        for path in ("/readiness", "/liveness"):
            obstacles = failed(node, path)
            assert obstacles[-1].startswith(f"data-hung: the data process (pid {pid}) has not answered for")
            assert f"`kill -CONT {pid}`" in obstacles[-1]
        node.wait(lambda: f"child_hung child=data pid={pid}" in node.last_words("n1", 1000), "the log")

        # The status contains the duration of the silence, so further ones follow as the seconds pass.
        hung = f"STATUS=data-hung: the data process (pid {pid})"
        node.wait(lambda: any(one.startswith(hung) for one in systemd.read()), "systemd to be told")
        systemd.received.clear()
        node.wait(lambda: sum(one.startswith(hung) for one in systemd.read()) >= 3, "more seconds")
        assert "WATCHDOG=1" not in systemd.received

        tls = node.certificate("operator", "op")
        flags = ["--endpoints", *node.endpoints, "--ca", str(tls.ca), "--cert", str(tls.cert)]
        result = CliRunner().invoke(status, [*flags, "--key", str(tls.key)])
        assert result.exit_code == 1
        text = str(result.exception) + result.output
        assert "one of its processes may hang: `curl http://127.0.0.1:8080/readiness`" in text
        assert "`child_hung` in its log" in text
    finally:
        node.resume("n1", "data")
    node.wait(lambda: probe(node, "/readiness") == (200, []), "the node to be ready again")
    node.wait(lambda: "child_answers child=data" in node.last_words("n1", 1000), "the log")
    node.wait(lambda: "WATCHDOG=1" in systemd.read(), "the watchdog to hear of it again")
    assert node.stop() == {"n1": 0}
    assert "STOPPING=1" in systemd.read()


def test_paused_control_process_is_reported_by_probes_systemd_and_log(
    node: LocalCluster, systemd: ServiceManager
) -> None:
    (pid,) = node.pids("n1", "control")
    node.pause("n1", "control")
    try:
        for path in ("/liveness", "/readiness"):
            node.wait(
                lambda path=path: any("control-hung: " in one for one in probe(node, path)[1]),  # type: ignore[misc]
                f"{path} to say so",
            )
            assert probe(node, path)[0] == 503
        node.wait(lambda: f"child_hung child=control pid={pid}" in node.last_words("n1", 1000), "the log")
        hung = f"STATUS=control-hung: the control process (pid {pid})"
        node.wait(lambda: any(one.startswith(hung) for one in systemd.read()), "systemd to be told")
    finally:
        node.resume("n1", "control")
    node.wait(lambda: probe(node, "/liveness") == (200, []), "the control process to answer")


def test_health_port_answers_after_kill_of_data_process(node: LocalCluster) -> None:
    node.kill("n1", part="data")
    code, _ = probe(node, "/readiness")
    assert code in {200, 503}, "the connection is not refused: the next process serves, or the supervisor"
    node.wait(lambda: probe(node, "/readiness") == (200, []), "the next data process")
