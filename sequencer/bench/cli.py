"""`rt bench raft`, `transport`: measure nodes on this machine. Figures go to stdout, one a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import click

from rt.cli.commands.bench import directory_option, rounds_option, show_all
from rt.cli.options import json_option
from sequencer.bench.raft import PARTS, Part, RaftBench
from sequencer.bench.transport import PARTS as TRANSPORT_PARTS
from sequencer.bench.transport import Part as TransportPart
from sequencer.bench.transport import TransportBench

nodes_option = click.option(
    "--nodes", default="3", show_default=True, type=click.Choice(["1", "3", "5"]), help="Number of nodes."
)
failovers_option = click.option(
    "--failovers",
    default=20,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Number of leaders to kill.",
)


@click.command()
@directory_option
@nodes_option
@rounds_option(3)
@click.option(
    "--seconds",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0.05, 3600),
    help="Duration of each measurement in a round. Seconds.",
)
@failovers_option
@click.option(
    "--catch-up-mb",
    default=40.0,
    show_default=True,
    type=click.FloatRange(0.1, 1000),
    help="Size of the state that a node must catch up with. MB.",
)
@click.option(
    "--snapshot-ms",
    default=5000,
    show_default=True,
    type=click.IntRange(10, 3_600_000),
    help="Interval of snapshots in the measurement of snapshots. Milliseconds.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Measure only this part. Repeatable. Default: all parts.",
)
@json_option
def raft(
    directory: str | None,
    nodes: str,
    rounds: int,
    seconds: float,
    failovers: int,
    catch_up_mb: float,
    snapshot_ms: int,
    parts: Sequence[str],
    as_json: bool,
) -> None:
    """Measure Raft on a cluster of processes: throughput, latency, failover, catch-up."""
    run = RaftBench(
        directory,
        nodes=int(nodes),
        rounds=rounds,
        seconds=seconds,
        failovers=failovers,
        catch_up_bytes=int(catch_up_mb * 1e6),
        snapshot_ms=snapshot_ms,
        parts=cast("Sequence[Part]", parts or PARTS),
    )
    show_all(run, as_json=as_json)


@click.command()
@directory_option
@nodes_option
@click.option(
    "--publishers", default=4, show_default=True, type=click.IntRange(1, 64), help="Number of publishers."
)
@click.option(
    "--value-bytes",
    default=(1024, 128),
    show_default=True,
    multiple=True,
    type=click.IntRange(1, 1 << 20),
    help="Size of the messages. Bytes. Repeatable.",
)
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(1, 3600),
    help="Duration of each measurement. Seconds.",
)
@click.option(
    "--rate-hz",
    default=1000.0,
    show_default=True,
    help="Rate at which latency is measured. Messages per second.",
)
@failovers_option
@click.option(
    "--many",
    default=200,
    show_default=True,
    type=click.IntRange(2, 1000),
    help="Number of publishers in the measurement of many publishers.",
)
@click.option(
    "--backlog-gb",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.001, 10_000),
    help="Size of the messages that wait when the nodes start. GB. The disk needs several times this size.",
)
@click.option(
    "--starts",
    default=1000,
    show_default=True,
    type=click.IntRange(2, 100_000),
    help="Number of starts of a publisher while it is offline, in the measurement of offline starts.",
)
@click.option(
    "--merging-gb",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.001, 1000),
    help="Size of the messages that one node merges alone. GB.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(TRANSPORT_PARTS),
    help="Measure only this part. Repeatable. Default: all parts.",
)
@json_option
def transport(
    directory: str | None,
    nodes: str,
    publishers: int,
    value_bytes: Sequence[int],
    seconds: float,
    rate_hz: float,
    failovers: int,
    many: int,
    backlog_gb: float,
    starts: int,
    merging_gb: float,
    parts: Sequence[str],
    as_json: bool,
) -> None:
    """Measure the transport: throughput, latency, failover, fairness, memory, backlogs, merging on a node."""
    run = TransportBench(
        directory,
        nodes=int(nodes),
        publishers=publishers,
        value_bytes=value_bytes,
        seconds=seconds,
        rate_hz=rate_hz,
        failovers=failovers,
        many=many,
        backlog_bytes=int(backlog_gb * 1e9),
        offline_starts=starts,
        merging_bytes=int(merging_gb * 1e9),
        parts=cast("Sequence[TransportPart]", parts or TRANSPORT_PARTS),
    )
    show_all(run, as_json=as_json)
