"""A chaos run by hand; its files are kept when it found a problem."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from sequencer.testing.chaos import Chaos


def main() -> int:
    """Run by hand; exit status 1 with a problem, and the files are kept then."""
    parser = argparse.ArgumentParser(prog="python -m sequencer.testing.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--dir", help="where to put the files of the run")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rt-chaos-", dir=arguments.dir))
    begun = time.monotonic()

    def say(text: str) -> None:
        os.write(1, f"{time.monotonic() - begun:7.2f} {text}\n".encode())

    say(f"seed {arguments.seed} in {root}")
    outcome = Chaos(
        root, nodes=arguments.nodes, seconds=arguments.seconds, seed=arguments.seed, say=say
    ).run()
    say(str(outcome))
    if not outcome.problems:
        shutil.rmtree(root)
    return bool(outcome.problems)
