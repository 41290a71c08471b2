"""`rt bench raft`, `transport`, `soak`: measure nodes on this machine. Figures go to stdout, one a line."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

import click

from rt.cli.bench import directory_option, json_option, rounds_option, show_all
from sequencer.bench.raft import PARTS, Part, RaftBench
from sequencer.bench.soak import Soak
from sequencer.bench.soak_faults import KINDS, Kind
from sequencer.bench.transport import PARTS as TRANSPORT_PARTS
from sequencer.bench.transport import Part as TransportPart
from sequencer.bench.transport import TransportBench

nodes_option = click.option(
    "--nodes", default="3", show_default=True, type=click.Choice(["1", "3", "5"]), help="Cluster size."
)
failovers_option = click.option(
    "--failovers", default=20, show_default=True, type=click.IntRange(1, 1000), help="Leaders to kill."
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
    help="Length of each measurement in a round.",
)
@failovers_option
@click.option(
    "--catch-up-mb",
    default=40.0,
    show_default=True,
    type=click.FloatRange(0.1, 1000),
    help="State that a node is behind by.",
)
@click.option(
    "--snapshot-ms",
    default=5000,
    show_default=True,
    type=click.IntRange(10, 3_600_000),
    help="Time between snapshots, where that is measured.",
)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this; may be repeated.")
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
    """Commit commands on a cluster of processes: speed, failover, catching up."""
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
@click.option("--publishers", default=4, show_default=True, type=click.IntRange(1, 64), help="Senders.")
@click.option(
    "--value-bytes",
    default=(1024, 128),
    show_default=True,
    multiple=True,
    type=click.IntRange(1, 1 << 20),
    help="Message size; may be repeated.",
)
@click.option(
    "--seconds", default=30.0, show_default=True, type=click.FloatRange(1, 3600), help="Time that counts."
)
@click.option(
    "--rate-hz", default=1000.0, show_default=True, help="Messages a second where latency is measured."
)
@failovers_option
@click.option(
    "--many", default=200, show_default=True, type=click.IntRange(2, 1000), help="Publishers at once."
)
@click.option(
    "--backlog-gb",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.001, 10_000),
    help="What publishers are ahead by when the nodes start; nodes and publishers need several times that.",
)
@click.option(
    "--merging-gb",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.001, 1000),
    help="What one node merges by itself.",
)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(TRANSPORT_PARTS), help="Only this; may be repeated."
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
    merging_gb: float,
    parts: Sequence[str],
    as_json: bool,
) -> None:
    """Send messages through nodes: throughput, latency, failover, fairness, memory; merge on one alone."""
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
        merging_bytes=int(merging_gb * 1e9),
        parts=cast("Sequence[TransportPart]", parts or TRANSPORT_PARTS),
    )
    show_all(run, as_json=as_json)


@click.command()
@directory_option
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(1, 1_000_000),
    help="How long there are faults; healing and judging come on top.",
)
@nodes_option
@click.option("--publishers", default=3, show_default=True, type=click.IntRange(1, 64), help="Sessions.")
@click.option("--seed", type=click.IntRange(0), help="Which faults come when (default: drawn, and said).")
@click.option("--fault", "kinds", multiple=True, type=click.Choice(KINDS), help="Only this; may be repeated.")
@json_option
def soak(
    directory: str | None,
    seconds: float,
    nodes: str,
    publishers: int,
    seed: int | None,
    kinds: Sequence[str],
    as_json: bool,
) -> None:
    """Send messages under random faults, then verify every promise."""
    seed = secrets.randbelow(2**32) if seed is None else seed
    click.echo(f"seed {seed}", err=True)
    run = Soak(
        directory,
        seed,
        seconds=seconds,
        nodes=int(nodes),
        publishers=publishers,
        kinds=cast("Sequence[Kind]", kinds or KINDS),
    )
    show_all(run, as_json=as_json)
