"""Starts a chaos run from the command line. Its files are kept if it finds a problem."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from chaos.run import Chaos
from chaos.stack import LIVE_S, StackChaos
from sequencer.localcluster.processes import nothing_left


def main() -> int:
    """Start a run from the command line. With a problem, return 1 and keep the files."""
    parser = argparse.ArgumentParser(prog="python -m chaos.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument(
        "--stack", action="store_true", help="Run the whole stack, with publishers. Default: Raft alone."
    )
    parser.add_argument(
        "--live-seconds",
        type=float,
        default=LIVE_S,
        help="With --stack: how long merged logs may take after a heal. Default: %(default)g.",
    )
    parser.add_argument("--dir", help="where to put the files of the run")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rt-chaos-", dir=arguments.dir))
    begun = time.monotonic()

    def say(text: str) -> None:
        os.write(1, f"{time.monotonic() - begun:7.2f} {text}\n".encode())

    say(f"seed {arguments.seed} in {root}")
    seconds, seed, nodes = arguments.seconds, arguments.seed, arguments.nodes
    with nothing_left():
        outcome = (
            StackChaos(
                root, nodes=nodes, seconds=seconds, seed=seed, live_s=arguments.live_seconds, say=say
            ).run()
            if arguments.stack
            else Chaos(root, nodes=nodes, seconds=seconds, seed=seed, say=say).run()
        )
    say(str(outcome))
    if not outcome.problems:
        shutil.rmtree(root)
    return bool(outcome.problems)
