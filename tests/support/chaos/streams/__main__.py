"""`python -m chaos.streams`: streams on real clusters under faults, judged by every published event.

Exit status 1 if a promise was broken; then the files of the run are kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from chaos.streams.cast import CLUSTERS
from chaos.streams.run import StreamChaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.streams", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="Decides the faults.")
    parser.add_argument(
        "--duration", type=float, default=300.0, help="Seconds of faults. Default: %(default)g."
    )
    parser.add_argument(
        "--rate", type=float, default=100.0, help="Events a second, of all clusters. Default: %(default)g."
    )
    parser.add_argument(
        "--clusters", type=int, default=2, choices=range(1, len(CLUSTERS) + 1), help="Default: %(default)d."
    )
    parser.add_argument("--nodes", type=int, default=3, help="Of each cluster. Default: %(default)d.")
    parser.add_argument("--lease", type=float, default=8.0, help="Seconds of a lease. Default: %(default)g.")
    parser.add_argument(
        "--away", type=float, default=40.0, help="Seconds that a cluster is away. Default: %(default)g."
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=15.0,
        help="Most seconds until all queues are served after a fault begins. Default: %(default)g.",
    )
    parser.add_argument("--keep", action="store_true", help="Keep the files of the run in any case.")
    parser.add_argument("--dir", help="Where to put the files of the run. A short path.")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rt-", dir=arguments.dir))
    begun_s = time.monotonic()

    def say(text: str) -> None:
        os.write(1, f"{time.monotonic() - begun_s:7.2f} load={os.getloadavg()[0]:.0f} {text}\n".encode())

    say(f"seed {arguments.seed} in {root}")
    outcome = StreamChaos(
        root,
        seed=arguments.seed,
        seconds=arguments.duration,
        clusters=arguments.clusters,
        nodes=arguments.nodes,
        rate_hz=arguments.rate,
        lease_s=arguments.lease,
        away_s=arguments.away,
        limit_s=arguments.limit,
        say=say,
    ).run()
    say(str(outcome))
    if not outcome.problems and not arguments.keep:
        shutil.rmtree(root)
    return bool(outcome.problems)


if __name__ == "__main__":
    raise SystemExit(main())
