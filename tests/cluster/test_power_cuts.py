"""Nodes that lose power lose unsynced bytes, but no replicated message."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.wired_nodes import WiredNodes
from faults import Faults
from power_loss import POWER, cut_power
from preloaded import built

pytestmark = pytest.mark.slow


class Powered:
    """Nodes with a separate copy of their synced data."""

    def __init__(self, nodes: WiredNodes) -> None:
        self.nodes = nodes
        self._library = built(nodes.root, "power", POWER)

    def start(self, *names: str) -> None:
        for name in names:
            with pytest.MonkeyPatch.context() as patch:
                self._kept(name).mkdir(exist_ok=True)
                patch.setenv("LD_PRELOAD", str(self._library))
                patch.setenv("KEPT_OF_SYNCS", str(self._kept(name)))
                self.nodes.start(name)

    def cut(self, *names: str) -> int:
        """Cut the power of these nodes at once; return how many files lost data."""
        self.nodes.kill(*names)
        return sum(cut_power(self.nodes.directory(name), self._kept(name)) for name in names)

    def _kept(self, name: str) -> Path:
        return self.nodes.root / f"kept.{name}"


@pytest.fixture
def powered() -> Iterator[Powered]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with WiredNodes(root) as nodes:
            powered = Powered(nodes)
            powered.start(*nodes.names)
            nodes.wait_ready()
            yield powered
    finally:
        shutil.rmtree(root)


def test_replicated_messages_survive_power_loss_of_all_nodes(powered: Powered, tmp_path: Path) -> None:
    nodes, lost = powered.nodes, 0
    faults = Faults(nodes, tmp_path)
    with faults.sender("kept") as kept, faults.sender("gone") as gone:
        faults.wait_flow(kept, gone)
        lost += powered.cut(*nodes.names)
        gone.lose()  # Now only nodes can have its replicated messages.
        powered.start(*nodes.names)
        gone.start()
        faults.wait_flow(kept, gone)
        lost += powered.cut(nodes.wait_ready())
        (down,) = set(nodes.names) - set(nodes.running)
        faults.wait_flow(kept, gone)
        powered.start(down)
        faults.wait_flow(kept, gone)
        kept.close()
        gone.close()
        faults.verdict()
    assert lost > 0
