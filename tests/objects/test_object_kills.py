"""Checkpoints in a SQLite store survive process kills at random moments and power cuts."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from power_loss import POWER, cut_power
from preloaded import built

from rt.objects import PersistedObjectSpace, SqliteStore

SEED = random.randrange(2**32)
"""Drawn for each run. The assertions print it, so that a failure can be repeated."""

WAIT_S = 120

PROGRAM = """
import os, random, sys
from rt.objects import CheckpointKind, PersistedObjectSpace, SqliteStore

store = SqliteStore(sys.argv[1])
space = PersistedObjectSpace()
space.load(store.reader())
step = space.get_or_create_value("step", 0)
items = space.get_or_create_list("items")
queue = space.get_or_create_queue("queue")
counts = space.get_or_create_dictionary("counts", keys=str, values=int)
while True:
    number = step.value = step.value + 1
    draw = random.Random(number)
    items.append(number)
    if number % 7 == 0:
        del items[draw.randrange(len(items)):]
    queue.extend([number] * draw.randrange(4))
    while len(queue) > 9:
        queue.dequeue()
    counts[str(draw.randrange(30))] = number
    counts.pop(str(draw.randrange(30)), None)
    if number % 5 == 0:
        space.get_or_create_set("other").add(number)
    if number % 20 == 0:
        space.delete("other")
    space.checkpoint(store, CheckpointKind.FULL if number % 13 == 0 else CheckpointKind.DIFFERENTIAL)
    os.write(1, b"%d\\n" % number)
"""


def expected(steps: int) -> dict[str, Any]:
    items: list[int] = []
    queue: list[int] = []
    counts: dict[str, int] = {}
    other: set[int] = set()
    for number in range(1, steps + 1):
        draw = random.Random(number)
        items.append(number)
        if number % 7 == 0:
            del items[draw.randrange(len(items)) :]
        queue = [*queue, *[number] * draw.randrange(4)][-9:]
        counts[str(draw.randrange(30))] = number
        counts.pop(str(draw.randrange(30)), None)
        if number % 5 == 0:
            other.add(number)
        if number % 20 == 0:
            other.clear()
    return {"items": items, "queue": queue, "counts": counts, "other": other}


def found(path: Path) -> tuple[int, dict[str, Any]]:
    """The stored step, and the collections stored with it."""
    with SqliteStore(path) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        if "step" not in space:
            return 0, expected(0)
        held = {
            "items": list(space.get_list("items")),
            "queue": list(space.get_queue("queue")),
            "counts": dict(space.get_dictionary("counts")),
            "other": set(space.get_set("other")) if "other" in space else set(),
        }
        return space.get_value("step").value, held


def run_and_kill(path: Path, environment: dict[str, str], draw: random.Random) -> int:
    """Run a process and kill it at a random moment. Returns the last step that it reported as committed."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, path], stdout=subprocess.PIPE, bufsize=0, env=environment
    )
    assert process.stdout is not None
    said = b""
    for _ in range(draw.randrange(1, 25)):
        ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
        assert ready, f"nothing was committed in {WAIT_S} s"
        chunk = os.read(process.stdout.fileno(), 65536)
        assert chunk, "the process ended by itself"
        said += chunk
    spin = draw.randrange(20_000)
    while spin:  # The kill can then hit any moment of the next checkpoint.
        spin -= 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    said += process.stdout.read()
    process.stdout.close()
    return int(said[: said.rindex(b"\n")].rsplit(b"\n", 1)[-1])


def check_rounds(
    path: Path, environment: dict[str, str], rounds: int, after_kill: Callable[[], None]
) -> None:
    draw = random.Random(SEED)
    for _ in range(rounds):
        promised = run_and_kill(path, environment, draw)
        after_kill()
        step, held = found(path)
        assert promised <= step <= promised + 1, SEED
        assert held == expected(step), SEED


@pytest.mark.slow
def test_last_checkpoint_survives_process_kill(tmp_path: Path) -> None:
    check_rounds(tmp_path / "state.db", dict(os.environ), 6, lambda: None)


@pytest.mark.slow
def test_last_reported_checkpoint_survives_power_cut(tmp_path: Path) -> None:
    directory, kept = tmp_path / "data", tmp_path / "kept"
    directory.mkdir()
    kept.mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(built(tmp_path, "power", POWER)),
        "KEPT_OF_SYNCS": str(kept),
    }
    lost = 0

    def cut() -> None:
        nonlocal lost
        lost += cut_power(directory, kept)

    check_rounds(directory / "state.db", environment, 5, cut)
    assert lost, "every byte had been synced: nothing was cut"
