"""Free loopback ports and the certificates of a local cluster, for concurrent threads and processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rt.errors import Timeout
from sequencer.localcluster import loopback
from sequencer.localcluster.loopback import BLOCK, free_port, free_ports
from sequencer.localcluster.nodes import LocalCluster


def test_free_ports_do_not_repeat_within_block() -> None:
    ports = [free_port() for _ in range(BLOCK // 2)]
    assert len(set(ports)) == len(ports)


def test_free_ports_differ_between_processes() -> None:
    ask = f"from sequencer.localcluster.loopback import *; print(free_ports({BLOCK // 2})); input()"
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(3)
        ]
        given = [set(free_ports(BLOCK // 2))]
        for other in others:
            assert other.stdout is not None
            given.append({int(port) for port in other.stdout.readline().strip("[]\n").split(",")})
    assert len(set.union(*given)) == sum(map(len, given)) == 4 * (BLOCK // 2)


def test_free_ports_exclude_listening_ports() -> None:
    with contextlib.ExitStack() as stack:
        listening = [
            stack.enter_context(socket.create_server(("127.0.0.1", free_port()))).getsockname()[1]
            for _ in range(20)
        ]
        assert not set(free_ports(BLOCK)) & set(listening)


def test_free_port_raises_timeout_if_none_is_free_and_succeeds_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loopback, "is_free", lambda _: False)
        with pytest.raises(Timeout, match="listened on"):
            free_port()
    assert free_port()


def test_certificate_is_shared_by_threads_until_renewed(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 1) as cluster, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cluster.certificate("operator", "op").load(), range(32)))
        assert {one.cert for one in found} == {found[0].cert}
        renewed = cluster.certificate("operator", "op", renew=True).load()
        assert renewed.cert != found[0].cert
        assert cluster.certificate("operator", "op").load().cert == renewed.cert
