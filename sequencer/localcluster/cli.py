"""The command `rt dev`."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from rt.cli.formats.console import report
from rt.cli.options import STREAM_NAME, option
from rt.cli.signals import Interrupted, Interrupts
from rt.errors import RtError
from sequencer.localcluster.dev_cluster import DevCluster


@click.command()
@option(
    "--nodes",
    type=click.Choice(["1", "3", "5", "7"]),
    help="Number of nodes of a new cluster. Default: 3.",
)
@option("--stream", type=STREAM_NAME, help="Stream of a new cluster. Default: dev.")
@option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("rt-dev"),
    help="Directory of the cluster: certificates, data, logs of the nodes. Its path must be short.",
)
@option(
    "--ephemeral",
    is_flag=True,
    help="Use a temporary directory, which is removed at the end, and any free ports.",
)
def dev(nodes: str | None, stream: str | None, directory: Path, ephemeral: bool) -> None:
    """Run a cluster on this machine, with mutual TLS, until Ctrl-C. For development.

    The first start makes certificates, chooses ports and creates the cluster in --directory. The next start
    continues with the same ports and data. It prints what to paste into a program and into a shell.
    """
    count = None if nodes is None else int(nodes)
    with Interrupts() as interrupts, _root(directory, is_temporary=ephemeral) as root:
        try:
            with interrupts.waiting():
                cluster = DevCluster(root, nodes=count, stream=stream, has_any_ports=ephemeral)
                _run(cluster, is_temporary=ephemeral)
        except Interrupted:
            click.echo(
                "Stopped." if ephemeral else "Stopped. `rt dev` continues with the same data.", err=True
            )


def report_lines(text: str) -> None:
    for line in text.splitlines():
        report(line)


def _run(cluster: DevCluster, *, is_temporary: bool) -> None:
    """Run the cluster until a signal. An error is printed line by line, because it may contain the end of a
    log.
    """
    with cluster:
        click.echo(f"starting {', '.join(cluster.nodes.names)} in {cluster.root}", err=True)
        try:
            leader = cluster.start()
            for line in introduction(cluster, leader, is_temporary=is_temporary):
                click.echo(line)
            cluster.watch(report_lines)
        except RtError as error:
            report_lines(str(error))
            raise click.exceptions.Exit(1) from error
        finally:
            click.echo("stopping", err=True)


def introduction(cluster: DevCluster, leader: str, *, is_temporary: bool) -> Iterator[str]:
    """The lines that show the user how to use the cluster."""
    stays = "removed at the end" if is_temporary else "kept"
    url, pki, stream = cluster.url, cluster.pki, cluster.nodes.stream
    names = ", ".join(cluster.nodes.names)
    endpoints = ",".join(cluster.nodes.endpoints)
    yield f"""\
The stream {stream!r} is up on {names}; {leader} leads. Data ({stays}): {cluster.root}

Publish from Python:

    import rt

    client = rt.connect("{url}")
    with client.publisher("feed1") as publisher:
        number = publisher.publish(b"hello", topic="greetings")
        publisher.wait(number, "merged", timeout=30)

Subscribe:

    import rt

    client = rt.connect("{url}")
    with client.subscriber("reader1") as subscriber:
        for message in subscriber:
            print(message.position, message.topic, message.value)
            subscriber.ack(message.position + 1)

Read with Spark:

    log = spark.read.format("rt").options(
        endpoints="{endpoints}", stream="{stream}",
        ca="{pki}/ca.crt", cert="{pki}/reader1.crt", key="{pki}/reader1.key",
    ).load()

In a shell:

    export RT_URL={shlex.quote(url)}
    date | rt pub
    rt sub
    rt status

Status page: {cluster.page} (first import {pki}/ops.p12 into the browser; it has no password)
Ctrl-C stops the nodes."""


@contextmanager
def _root(directory: Path, *, is_temporary: bool) -> Iterator[Path]:
    if not is_temporary:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="rt-dev-", ignore_cleanup_errors=True) as root:
        yield Path(root)
