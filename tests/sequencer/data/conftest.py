"""Fixtures for the tests of the data process."""

from __future__ import annotations

from pathlib import Path

import pytest
from receiving_node import make_pki

from sequencer.config.config import ClusterMember, NodeConfig
from sequencer.localcluster.loopback import free_port


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def config(pki: Path, tmp_path: Path) -> NodeConfig:
    ports = [free_port(), free_port()]
    return NodeConfig(
        stream="s",
        name="n1",
        directory=str(tmp_path),
        members={"n1": ClusterMember(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")},
        ca=str(pki / "ca.crt"),
        cert=str(pki / "n1.crt"),
        key=str(pki / "n1.key"),
        listen="127.0.0.1",
        raft_port=ports[0],
        data_port=ports[1],
        rest_port=0,
        health_port=0,
    )
