"""`rt export`: write a merged log as Parquet to a directory or any file system of Hadoop."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.options import STREAM_NAME, ExistingPath, FiniteRange, json_option, option
from rt.cli.signals import Interrupts
from rt.cli.spark.errors import spark_errors
from rt.cli.spark.session import parse_setting, spark_session
from rt.errors import RtError
from rt.units import format_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rt.spark.export.exporter import ExportSettings
    from rt.spark.export.target import ExportedPart, ExportTarget


@click.command()
@click.argument("target", metavar="TARGET")
@option(
    "--path",
    type=ExistingPath(file_okay=False, resolve_path=True),
    help="Directory of the merged log to export. Use it or --endpoints.",
)
@option("--stream", type=STREAM_NAME, help="Name of the stream. Only with --endpoints.")
@endpoint_options(
    "subscriber",
    "gRPC endpoints of the nodes, separated by commas. Exports from the nodes instead of --path.",
    cert_help="PEM file of the client certificate; its role must be subscriber. "
    "The nodes keep, under its name, the messages that are not exported yet.",
)
@option("--once", is_flag=True, help="Stop at the end of the log. Default: wait for new messages.")
@option("--status", "only_status", is_flag=True, help="Only show how far the export to TARGET is.")
@option(
    "--target-file-mb",
    "part_mb",
    type=click.IntRange(min=1),
    default=256,
    help="Size of the log data in one part. MiB.",
)
@option(
    "--linger-seconds",
    type=FiniteRange(min=0),
    default=60.0,
    help="Longest time that a smaller part waits for new messages. Seconds.",
)
@option(
    "--skip-lost",
    is_flag=True,
    help="Continue if messages were trimmed before they were exported. Default: fail.",
)
@option("--master", help="Master of Spark. Default: that of spark-submit, or all cores of this machine.")
@option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark, such as spark.hadoop.fs.s3a.endpoint. Repeatable.",
)
@json_option
def export(
    target: str,
    path: str | None,
    nodes: NodeOptions,
    stream: str | None,
    once: bool,
    only_status: bool,
    part_mb: int,
    linger_seconds: float,
    skip_lost: bool,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a merged log to TARGET as Parquet, each message once, partitioned by date and topic.

    TARGET is a directory or a URL of Hadoop, such as hdfs://... or s3a://.... Each part becomes visible as a
    whole. After a restart the export continues after the last part. The nodes keep messages that are not
    exported yet, within their limits, under the name in the certificate. The command reports each part on
    a line. It needs the extra spark, and Java.
    """
    settings = [parse_setting(each) for each in conf]
    if only_status:
        if path or stream or nodes.is_given:
            raise click.UsageError("--status takes only TARGET.")
        with _target(target, master, settings) as (found, _):
            _show_status(found, as_json=as_json)
        return
    what = _settings(_source(path, stream, nodes), part_mb, linger_seconds, skip_lost=skip_lost)
    with (
        Interrupts() as interrupts,
        _target(target, master, settings, must_have_spark=True) as (found, spark),
    ):
        from rt.spark.export.exporter import Exporter

        assert spark is not None

        def wait(seconds: float) -> None:
            with interrupts.waiting():
                time.sleep(seconds)

        begun = time.monotonic()
        for part in Exporter(what, found, spark, wait=wait).parts(once=once):
            if as_json:
                click.echo(json.dumps(part_object(part)))
            else:
                click.echo(f"rt: {part_text(part)}, in {time.monotonic() - begun:.1f} s", err=True)
            sys.stdout.flush()
            with interrupts.waiting():
                begun = time.monotonic()


def part_text(part: ExportedPart) -> str:
    lost = part.end - part.start - part.rows
    return (
        f"exported up to position {part.end:,}: {part.rows:,} messages from {part.start:,} on"
        f"{f' ({lost:,} are lost)' if lost else ''}, {len(part.moves)} files, "
        f"{part.log_end - part.end:,} messages behind"
    )


def part_object(part: ExportedPart) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(part).items() if name not in {"moves", "time_ns"}},
        "files": len(part.moves),
        "lag": part.log_end - part.end,
        "time": format_time(part.time_ns, digits=3),
    }


def _show_status(found: ExportTarget, *, as_json: bool) -> None:
    part = found.last()
    if as_json:
        click.echo(
            json.dumps(None if part is None else {**part_object(part), "is_moved": found.is_moved(part)})
        )
    elif part is None:
        click.echo("nothing is exported yet")
    else:
        left = "" if found.is_moved(part) else "; its files are still being moved"
        click.echo(f"{part_text(part)} at {format_time(part.time_ns, digits=0)}{left}")


def _source(path: str | None, stream: str | None, nodes: NodeOptions) -> dict[str, str | None]:
    """The options of the Spark source."""
    if path is not None and nodes.is_given:
        raise click.UsageError("--path excludes --endpoints.")
    endpoints, tls = ((), None) if path is not None else nodes.parse()
    if tls is None:
        return {"path": path, "stream": stream}
    files = {"ca": tls.ca, "cert": tls.cert, "key": tls.key}
    return {
        "path": path,
        "endpoints": ",".join(endpoints),
        "stream": nodes.stream(stream),
        **{name: os.path.abspath(file) for name, file in files.items()},
    }


def _settings(
    given: dict[str, str | None], part_mb: int, linger_seconds: float, *, skip_lost: bool
) -> ExportSettings:
    from rt.spark.export.exporter import ExportSettings
    from rt.spark.options import ClusterSource
    from rt.spark.source.options import parse_options

    where = parse_options({name: value for name, value in given.items() if value}).where
    hold = None
    if isinstance(where, ClusterSource):
        from rt.net.tls import TLS

        identity = TLS(ca=where.ca, cert=where.cert, key=where.key).identity
        if identity.role != "subscriber":
            raise RtError(
                "the role of the certificate cannot hold messages back",
                where=where.cert,
                got=identity.uri,
                expected="a certificate of role subscriber",
            )
        hold = identity.name
    return ExportSettings(where, hold, part_mb * 2**20, linger_seconds, skip_lost)


@contextlib.contextmanager
def _target(
    target: str, master: str | None, settings: list[tuple[str, str]], *, must_have_spark: bool = False
) -> Iterator[tuple[ExportTarget, SparkSession | None]]:
    """The target, and a Spark session if the target or the work needs one."""
    from rt.spark.export.filesystem import is_local, open_storage
    from rt.spark.export.target import ExportTarget

    local = ExportTarget(open_storage(target, None)) if is_local(target) else None
    if local is not None:
        if not must_have_spark:
            yield local, None
            return
        local.last()  # Fail before Spark starts if the target cannot be read.
    spark = spark_session("rt export", master, settings)
    hint = "What was exported before is complete. See the log of Spark."
    with spark_errors("the export has failed in Spark", target, hint):
        try:
            yield local or ExportTarget(open_storage(target, spark)), spark
        finally:
            spark.stop()
