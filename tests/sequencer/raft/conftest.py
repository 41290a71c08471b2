"""What tests of Raft share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raft_bench import Clock, virtual_clock
from raft_transport_bench import Net, Pki

from rt.net.tls import TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def node_tls(pki: Pki) -> dict[str, TLS]:
    return {name: pki.tls(name) for name in ("n1", "n2", "n3")}


@pytest.fixture
def net(node_tls: dict[str, TLS]) -> Iterator[Net]:
    made = Net({name: node_tls[name] for name in ("n1", "n2")})
    yield made
    for mesh in made.inboxes:
        mesh.close()


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A clock that advances when a test advances it."""
    with virtual_clock() as clock:
        yield clock
