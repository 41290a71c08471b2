"""Networks that delay or lose packets: streams keep flowing, and no message is lost or repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos.wired_nodes import WiredNodes
from faults import Faults

pytestmark = pytest.mark.slow


def slow(nodes: WiredNodes) -> None:
    """Delay each direction by 30 ms. A heartbeat and its answer then take most of a heartbeat's period."""
    nodes.delay(0.03)


def lossy(nodes: WiredNodes) -> None:
    """Delay two of a hundred pieces by 0.2 s or more. A follower waits at least 0.3 s for its leader."""
    nodes.lose(0.02)


@pytest.mark.parametrize("bad", [slow, lossy])
def test_streams_flow_over_bad_network_and_restarted_node_catches_up(
    faults: Faults, bad: Callable[[WiredNodes], None]
) -> None:
    nodes = faults.nodes
    with faults.sender(f"{bad.__name__}-one") as one, faults.sender(f"{bad.__name__}-other") as other:
        faults.wait_flow(one, other)
        bad(nodes)
        faults.wait_flow(one, other)
        away = nodes.names[0]
        nodes.kill(away)
        faults.wait_flow(one, other)
        nodes.start(away)
        nodes.wait_merged(max(map(nodes.merged_position, nodes.names)), away)
        other.kill()
        other.start()
        faults.wait_flow(one, other)
        for name in nodes.names:
            nodes.heal(name)
        faults.wait_flow(one, other)
        one.close()
        other.close()
        faults.verdict()
