"""Publishers continue, and no message is lost, when disks of nodes are replaced by empty ones."""

from __future__ import annotations

import contextlib

import pytest
from faults import Faults
from senders import Sender

from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import read_identity
from rt.log.write.writer import LogWriter
from rt.sidecar.progress_file import read_progress

pytestmark = pytest.mark.slow


def test_restarted_publisher_continues_with_majority_after_every_disk_was_replaced(
    faults: Faults,
) -> None:
    nodes = faults.nodes
    with faults.sender("replaced") as sender:
        for name in nodes.names:
            faults.wait_flow(sender)
            before = faults.restored
            nodes.kill(name)
            nodes.wipe(name)
            nodes.start(name)
            faults.wait(lambda before=before: faults.restored > before, f"the disk of {name} to be whole")
        away = nodes.wait_ready()
        nodes.kill(away)
        sender.kill()
        sender.start()
        faults.wait_flow(sender)
        nodes.start(away)
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def delete_merged_run(faults: Faults, sender: Sender) -> None:
    """Wait until the publisher's run is merged, then delete it, as the publisher does at its next start."""
    path = str(sender.directory)
    with contextlib.closing(LogWriter.open(path, read_identity(REAL, path))) as writer:

        def is_merged() -> bool:
            record = read_progress(path)
            return record is not None and record.merged.number == writer.end

        faults.wait(is_merged, "all of the run to be merged")
        (*_, last) = writer.trim(SegmentId(1, 0), TrimReason.MERGED)
        assert last.end == writer.end


def test_publisher_with_deleted_merged_run_continues_on_only_node_after_disk_replacement(
    faults: Faults,
) -> None:
    nodes, session, name = faults.nodes, "orphan", faults.nodes.names[0]
    tls = nodes.certificate("publisher", session)
    with Sender(nodes.root / session, session, nodes.endpoints[:1], tls) as sender:
        faults.senders.append(sender)
        faults.wait_flow(sender)
        sender.kill()
        delete_merged_run(faults, sender)
        before = faults.restored
        nodes.kill(name)
        nodes.wipe(name)
        nodes.start(name)
        faults.wait(lambda: faults.restored > before, f"the disk of {name} to be whole")
        sender.start()
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()
