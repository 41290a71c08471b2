"""Settings that a seed decides in advance: the cluster, its times and sizes, and its faults.

Every seed omits some faults and makes others frequent, because an even mix finds no rare combinations.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args
from unittest import mock

import sequencer.raft.core.progress
import sequencer.raft.core.replication
import sequencer.raft.proposals
import sequencer.state.leases.requests

Fault: TypeAlias = Literal[
    "kill",
    "kill_in_change",
    "power_cut",
    "power_cut_in_change",
    "power_cut_all",
    "wipe",
    "old_disk",
    "pause",
    "break",
    "cut_off",
    "cut_off_leader",
    "one_way",
    "split",
    "bridge",
    "storm",
    "jump",
    "full",
    "failed_sync",
    "slow_disk",
    "slow_machine",
    "hand_over",
    "reset",
    "force",
]

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
_WEIGHTS: Final[dict[Fault, tuple[int, ...]]] = {
    "power_cut_all": (0, 1, 4),
    "wipe": (0, 1, 4),
    "old_disk": (0, 1, 4),
    "hand_over": (0, 10, 40),  # It needs a leader, and often there is none.
    "reset": (0, 0, 1, 10),
    "force": (0, 0, 0, 2),  # It loses all disks except one.
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one simulation. Times are in seconds of virtual time, sizes in bytes."""

    nodes: int
    seconds: float
    """Duration of the faults; then everything is repaired."""
    settle_s: float = 20.0
    """Maximum time after the faults until everything must be well."""
    snapshot_ms: int = 200
    keep_entries: tuple[int, ...] = (4,)
    """Assigned to the members in turn, so that their logs start at different indexes."""
    worker_s: float = 0.01
    """Maximum time, in addition to a sync, of each step of background work: up to the next disk change, or
    until the loop receives the result.
    """
    segment_bytes: int = 2048
    append_bytes: int = 1024
    chunk_bytes: int = 200
    window_bytes: int = 500
    packs_max: int = 4
    pack_commands_max: int = 8
    in_flight_messages: int = 4
    padding: int = 100
    """Of a machine's snapshot."""
    propose_every_s: float = 0.05
    """For each of three nodes; with more nodes, each one proposes less often."""
    spares: int = 0
    """Blank nodes that are not members at first. With spares, members are added and removed. A seed never
    sets it.
    """
    holders: int = 0
    """Number of clients that ask for leases; a seed never sets it."""
    askers: int = 0
    """Number of loops that post requests to the owners of leases, and of loops in which the owners work; a
    seed never sets it.
    """
    requests_kept_s: float = 1.0
    """How long requests to owners are kept after their time, if there are more than `requests_kept`."""
    requests_kept: int = 4
    retry_ms: int = 1000
    burst: float = 0.01
    """Probability that a thousand commands are proposed at once, ..."""
    large: float = 0.01
    """... or one of 100 KiB."""
    fault_every_s: float = 0.3
    faults: dict[Fault, int] = field(default_factory=dict)
    """Weights of the faults."""
    lost: float = 0.0
    """Probability that a message is lost on an open connection, ..."""
    doubled: float = 0.0
    """... is delivered twice, ..."""
    overtaken: float = 0.0
    """... or is overtaken by a later one."""
    drift: float = 0.01
    """Maximum difference between the rates of two clocks."""


def draw_settings(rng: random.Random, *, nodes: int | None, seconds: float) -> Settings:
    """Return random settings; `nodes` and `seconds` may be fixed."""
    is_bad = rng.random() < 0.3
    return Settings(
        nodes=nodes or rng.choice((1, 3, 3, 3, 3, 5, 5, 7)),
        seconds=seconds,
        snapshot_ms=rng.choice((50, 100, 200, 500)),
        keep_entries=rng.choice(((1,), (4,), (20, 20, 1), (1, 200))),
        worker_s=rng.choice((0.001, 0.01, 0.03, 0.2)),
        segment_bytes=rng.choice((512, 2048, 2048, 16384)),
        append_bytes=rng.choice((300, 1024, 8192, 256 * 1024)),
        chunk_bytes=rng.choice((100, 300, 4096, 1 << 20)),
        window_bytes=rng.choice((200, 1000, 8 << 20)),
        packs_max=rng.choice((1, 2, 4, 16)),
        pack_commands_max=rng.choice((1, 3, 8, 1024)),
        in_flight_messages=rng.choice((1, 2, 8, 256)),
        padding=rng.choice((0, 300, 2000)),
        propose_every_s=rng.choice((0.03, 0.1, 0.3)),
        retry_ms=rng.choice((100, 1000)),
        burst=rng.choice((0.0, 0.0, 0.001)),
        large=rng.choice((0.0, 0.0, 0.003)),
        fault_every_s=rng.choice((0.1, 0.3, 0.6)),
        faults=_draw_faults(rng),
        lost=rng.choice((0.0, 0.01, 0.1)) if is_bad else 0.0,
        doubled=rng.choice((0.0, 0.01, 0.2)) if is_bad else 0.0,
        overtaken=rng.choice((0.0, 0.01, 0.2)) if is_bad else 0.0,
        drift=rng.choice((0.0, 0.01, 0.1)),
    )


def _draw_faults(rng: random.Random) -> dict[Fault, int]:
    weights: dict[Fault, int] = {}
    for fault in FAULTS:
        weight = rng.choice(_WEIGHTS.get(fault, (0, 0, 3, 10)))
        if weight:
            weights[fault] = weight
    return weights or {"kill": 1}


@contextlib.contextmanager
def in_force(settings: Settings) -> Iterator[None]:
    """Replace size constants of the nodes by small values, so that a short run reaches every limit."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (sequencer.raft.core.replication, "APPEND_BYTES", settings.append_bytes),
            (sequencer.raft.core.replication, "CHUNK_BYTES_MAX", settings.chunk_bytes),
            (sequencer.raft.core.replication, "WINDOW_BYTES", settings.window_bytes),
            (sequencer.raft.core.progress, "IN_FLIGHT_MESSAGES_MAX", settings.in_flight_messages),
            (sequencer.raft.proposals, "PACKS_MAX", settings.packs_max),
            (sequencer.raft.proposals, "PACK_COMMANDS_MAX", settings.pack_commands_max),
            (sequencer.state.leases.requests, "KEPT_NS", int(settings.requests_kept_s * 1e9)),
            (sequencer.state.leases.requests, "POSTED_KEPT", settings.requests_kept),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
