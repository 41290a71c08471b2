"""Disks of nodes that are replaced by empty ones: they have no say before they hold what was lost."""

from __future__ import annotations

import pytest
from faults import Faults

pytestmark = pytest.mark.slow


def restored(faults: Faults) -> int:
    """How often a disk was found to be whole again."""
    logs = [(faults.nodes.root / f"{name}.log").read_text() for name in faults.nodes.names]
    return sum(log.count("proposal_submitted RestoreDisk(") for log in logs)


def test_when_every_disk_was_replaced_a_publisher_that_restarts_still_goes_on_with_a_majority(
    faults: Faults,
) -> None:
    nodes = faults.nodes
    with faults.sender("replaced") as sender:
        for name in nodes.names:
            faults.wait_flow(sender)
            before = restored(faults)
            nodes.kill(name)
            nodes.wipe(name)
            nodes.start(name)
            faults.wait(lambda before=before: restored(faults) > before, f"the disk of {name} to be whole")
        away = nodes.wait_ready()
        nodes.kill(away)
        sender.kill()
        sender.start()
        faults.wait_flow(sender)
        nodes.start(away)
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()
