"""`rt bench raft`, `transport`: measure nodes on this machine. Figures go to stdout, one a line.

`rt bench compare` measures other systems too, and ends with a table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from rt.cli.commands.bench import directory_option, number_option, parts_option, rounds_option, show_all
from rt.cli.options import FiniteRange, json_option, option
from sequencer.bench.compare.system import PEERS
from sequencer.bench.raft import PARTS as RAFT_PARTS
from sequencer.bench.raft import RaftBench
from sequencer.bench.transport import PARTS as TRANSPORT_PARTS
from sequencer.bench.transport import TransportBench

nodes_option = option("--nodes", default="3", type=click.Choice(["1", "3", "5"]), help="Number of nodes.")
rates_option = option(
    "--rate-hz",
    "rates_hz",
    default=(10.0, 1000.0),
    multiple=True,
    type=FiniteRange(0.1, 100_000),
    help="Rate at which latency is measured. Messages per second. Repeatable.",
)
failovers_option = number_option("--failovers", 20, 1, 1000, "Number of leaders to kill.")

# The parameters are named as fields of `RaftBench` and so on, and described there.


@click.command()
@directory_option
@nodes_option
@rounds_option(3)
@number_option("--seconds", 5.0, 0.05, 3600, "Duration of each measurement in a round. Seconds.")
@failovers_option
@number_option("--catch-up-mb", 40.0, 0.1, 1000, "Size of the state that a node must catch up with. MB.")
@number_option(
    "--snapshot-ms",
    5000,
    10,
    3_600_000,
    "Interval of snapshots in the measurement of snapshots. Milliseconds.",
)
@parts_option(RAFT_PARTS)
@json_option
def raft(nodes: str, parts: Sequence[str], as_json: bool, **settings: Any) -> None:
    """Measure Raft on a cluster of processes: throughput, latency, failover, catch-up."""
    run = RaftBench(nodes=int(nodes), parts=parts or RAFT_PARTS, **settings)
    show_all(run.figures(), as_json=as_json)


@click.command()
@directory_option
@nodes_option
@number_option("--publishers", 4, 1, 64, "Number of publishers.")
@number_option("--subscribers", 1, 1, 16, "Number of subscribers while throughput is measured.")
@rounds_option(3)
@option(
    "--value-bytes",
    default=(1024, 128),
    multiple=True,
    type=click.IntRange(1, 1 << 20),
    help="Size of the messages. Bytes. Repeatable.",
)
@number_option(
    "--seconds", 10.0, 1, 3600, "Duration of each round of throughput and latency, and of `many`. Seconds."
)
@rates_option
@failovers_option
@number_option("--many", 200, 2, 1000, "Number of publishers in the measurement of many publishers.")
@number_option(
    "--backlog-gb",
    10.0,
    0.001,
    10_000,
    "Size of the messages that wait when the nodes start. GB. The disk needs several times this size.",
)
@number_option(
    "--starts",
    1000,
    2,
    100_000,
    "Number of starts of a publisher while it is offline, in the measurement of offline starts.",
)
@number_option("--merging-gb", 1.0, 0.001, 1000, "Size of the messages that one node merges alone. GB.")
@parts_option(TRANSPORT_PARTS)
@json_option
def transport(nodes: str, parts: Sequence[str], as_json: bool, **settings: Any) -> None:
    """Measure the transport: throughput, latency, failover, fairness, memory, backlogs, merging on a node."""
    run = TransportBench(nodes=int(nodes), parts=parts or TRANSPORT_PARTS, **settings)
    show_all(run.figures(), as_json=as_json)


@click.command()
@directory_option
@option(
    "--peer",
    "peers",
    multiple=True,
    required=True,
    type=click.Choice(list(PEERS)),
    help="System to compare with. It must be installed. Repeatable.",
)
@option("--tls/--no-tls", default=True, help="Use mutual TLS in the peers. rt always does.")
@option(
    "--fsync/--no-fsync",
    default=True,
    help="Sync each message before it is acknowledged, in peers that can. rt always does.",
)
@number_option("--message-bytes", 1024, 16, 1 << 18, "Size of the messages. Bytes.")
@number_option("--seconds", 5.0, 0.05, 3600, "Duration of each measurement in a round. Seconds.")
@rounds_option(3)
@rates_option
@json_option
def compare(as_json: bool, **settings: Any) -> None:
    """Measure rt beside NATS JetStream, Redis streams or RabbitMQ streams, all with three servers.

    Each round starts every system in turn, with one publisher and one consumer in Python. It ends with one
    table. It needs the servers' programs, and the extra bench for their Python clients.
    """
    from sequencer.bench.compare.bench import CompareBench
    from sequencer.bench.compare.table import table

    def on_start(number: int, name: str) -> None:
        click.echo(f"round {number + 1} of {settings['rounds']}: {name}", err=True)

    found = CompareBench(**settings).run(on_start)
    for line in [json.dumps(each.as_dict()) for each in found] if as_json else table(found):
        click.echo(line)
