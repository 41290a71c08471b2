"""Memory of a node under attack by clients with valid certificates: its processes stay within a bound.

The bound applies to the kernel's count (`VmHWM`) of real processes. `pytest --log-cli-level=INFO` prints it.
While one kind of attack runs alone, the node serves a publisher that reaches no other node. It also serves a
subscriber, unless the subscriber must read expanding messages.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_clients import ATTACKS, LEASE_GROUP, Target, attackers

import rt
from rt.net.identity import Role
from rt.net.memory_guard import MEMORY_BYTES_MAX
from sequencer.localcluster.nodes import LocalCluster

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

WAIT_S = 300.0
CERTIFICATES = 2
POLL_S = 0.1
QUIET_S = 2.0
"""An attack continues until the peak has not risen for this time, in seconds."""
CONTROL_BYTES_MAX = 128 * 2**20
LOG_MESSAGES = [os.urandom(2**20)] * 64


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """Start nodes with REST, and with a log that is large enough for pulls."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with LocalCluster(root, with_rest=True) as nodes:
            nodes.start()
            nodes.wait_ready()
            tls = nodes.certificate("publisher", "fill")
            with rt.Publisher(
                root / "out", "s", publisher_id="fill", endpoints=nodes.endpoints, tls=tls
            ) as filling:
                filling.wait(filling.publish_many(LOG_MESSAGES)[-1], "merged", timeout=WAIT_S)
            yield nodes
    finally:
        shutil.rmtree(root, ignore_errors=True)


def target_of(nodes: LocalCluster) -> Target:
    def paths(role: Role, count: int) -> list[list[str]]:
        made = (nodes.certificate(role, f"h-{role}{at}", lease_groups=groups[role]) for at in range(count))
        return [[str(tls.ca), str(tls.cert), str(tls.key)] for tls in made]

    groups: dict[Role, list[str]] = {"publisher": [], "subscriber": [LEASE_GROUP], "operator": []}
    return Target(
        nodes.data_ports["n1"],
        nodes.rest_ports["n1"],
        paths("publisher", CERTIFICATES),
        paths("subscriber", CERTIFICATES),
        paths("operator", 1),
    )


def peak_bytes(pid: int) -> int:
    """Return the highest memory use of a process since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


EXPANDING = "compressed_pushes"
"""The messages of this attack are merged and expand 512 times in each reader, so a subscriber lags far
behind.
"""


def serve_honest(nodes: LocalCluster, publisher: rt.Publisher, subscriber: rt.Subscriber | None) -> None:
    """Check that a message is merged, and read if there is a subscriber, during an attack.

    The message has its own topic, because millions of expanding messages may precede it. The subscriber does
    not check them one by one.
    """
    topic = os.urandom(8).hex()
    number = publisher.publish(b"honest", topic)
    try:
        publisher.wait(number, "merged", timeout=WAIT_S)
    except rt.Timeout as error:
        raise AssertionError(f"{error}\n{publisher.stats()}\n{nodes.last_words('n1', 40)}") from error
    if subscriber is None:
        return
    deadline = time.monotonic() + WAIT_S
    while (batch := subscriber.next_batch(1.0)) is None or topic not in batch.topic_names:
        nodes.check_alive()
        assert time.monotonic() < deadline, "the message was not read"


@pytest.mark.parametrize(
    "names", [*([name] for name in ATTACKS), [*ATTACKS]], ids=lambda names: "+".join(names)[:40]
)
def test_node_memory_stays_within_bound_during_attacks(
    nodes: LocalCluster,
    tmp_path: Path,
    names: list[str],
) -> None:
    address = f"127.0.0.1:{nodes.data_ports['n1']}"
    pids = {part: nodes.pids("n1", part)[0] for part in ("data", "control")}
    limits = {"data": MEMORY_BYTES_MAX, "control": CONTROL_BYTES_MAX}
    with (
        rt.Publisher(
            tmp_path / "out",
            "s",
            publisher_id="good",
            endpoints=[address],
            tls=nodes.certificate("publisher", "good"),
        ) as publisher,
        rt.Subscriber(
            tmp_path / "in",
            "s",
            endpoints=[address],
            tls=nodes.certificate("subscriber", "good"),
            connect_timeout=None,
            position="latest",
        ) as subscriber,
    ):
        nodes.wait(lambda: subscriber.log_end is not None, "the subscriber to know where the latest is")
        serve_honest(nodes, publisher, subscriber)
        for pid in pids.values():
            forget_peak(pid)
        before = peak_bytes(pids["data"])
        with attackers() as attack:
            target = target_of(nodes)
            for name in names:
                attack.begin(name, target)
            reader = None if EXPANDING in names else subscriber
            peaks, risen_s = dict.fromkeys(pids, 0), time.monotonic()
            while time.monotonic() < risen_s + QUIET_S:
                if len(names) == 1:
                    serve_honest(nodes, publisher, reader)
                else:  # All attacks at once use all processors: no service is promised.
                    nodes.check_alive()
                time.sleep(POLL_S)
                now = {part: peak_bytes(pid) for part, pid in pids.items()}
                if now["data"] > peaks["data"] + 2**20:
                    risen_s = time.monotonic()
                peaks = now
        logger.info("%s: MiB before %d, at most %d", "+".join(names), before // 2**20, peaks["data"] // 2**20)
        over = {part: peak // 2**20 for part, peak in peaks.items() if peak > limits[part]}
        assert not over, f"MiB in memory: {over}"
        assert pids == {part: nodes.pids("n1", part)[0] for part in pids}, "a process was restarted"
        serve_honest(nodes, publisher, reader)
