"""`python -m rt.streams.simulate`: the report on stdout, progress and the time that it took on stderr.

Exit status: 0, or 1 if an invariant is broken, or 2 for wrong options.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import time
from typing import NoReturn

from rt.errors import InvalidOption
from rt.streams.balancer.lease import DEFAULT_TIMES, LeaseTimes
from rt.streams.simulate.options import BALANCERS, SimulationOptions
from rt.streams.simulate.report import lines
from rt.streams.simulate.run import simulate

USAGE = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    given = vars(_parser().parse_args(arguments))
    as_json = given.pop("json")
    try:
        times = LeaseTimes(lease_s=given.pop("lease_s"), look_s=given.pop("look_s"))
        options = SimulationOptions(times=times, **given)
    except InvalidOption as error:
        _say(f"rt.streams.simulate: {error}")
        return USAGE
    # Lost leases are expected: the simulation is about them.
    logging.getLogger("rt.streams").setLevel(logging.CRITICAL + 1)
    began_s = time.process_time()
    report = simulate(options, _say)
    text = json.dumps(report.as_json(), indent=2) if as_json else "\n".join(lines(report))
    sys.stdout.write(text + "\n")
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent_s = time.process_time() - began_s
    _say(
        f"{report.virtual_s:,.0f} virtual seconds in {spent_s:.1f} s of processor time, {memory_mib:.0f} MiB"
    )
    return 0 if report.is_good else 1


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    default = SimulationOptions()
    parser = _Parser(
        prog="rt.streams.simulate",
        description="Simulate clusters, hosts and streams in virtual time, with the balancers of rt.streams.",
        allow_abbrev=False,
    )
    for name, what in (
        ("clusters", "Clusters, each with one queue"),
        ("hosts", "Hosts at the start"),
        ("streams", "Streams, spread over the clusters"),
        ("seed", "The seed; the same one gives the same report"),
        ("failures", "Hosts that crash or are cut off; 0: none"),
        ("joins", "Hosts that join; 0: none"),
        ("clusters-away", "Clusters that are away for two times of a lease; 0: none"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{what}. Default: {value:,}."
        )
    for name, value, what in (
        ("lease-s", DEFAULT_TIMES.lease_s, "How long a lease lasts without a renewal, in seconds"),
        ("look-s", DEFAULT_TIMES.look_s, "The interval between looks at the leases, in seconds"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=value, metavar="S", help=f"{what}. Default: {value:g}."
        )
    parser.add_argument(
        "--balancer",
        default=default.balancer,
        metavar="NAME",
        help=f"{', '.join(BALANCERS)}. Default: lease.",
    )
    parser.add_argument(
        "--no-rolling-restart", dest="rolling_restart", action="store_false", help="Leave it out."
    )
    parser.add_argument(
        "--no-cluster-change", dest="cluster_change", action="store_false", help="Add and remove no cluster."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
