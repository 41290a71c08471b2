"""`rt export`: a merged log into Parquet, in a local directory or any file system that Hadoop knows."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rt.cli.options import STREAM_NAME, json_option, option
from rt.cli.signals import Interrupts
from rt.cli.text import escape, format_time
from rt.errors import RtError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rt.spark.export_target import ExportTarget, Part
    from rt.spark.exporting import ExportSettings

_FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)


@click.command()
@click.argument("target", metavar="TARGET")
@option(
    "--path",
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="A merged log in a directory.",
)
@option("--endpoints", metavar="HOST:PORT,...", help="Instead: the nodes' gRPC ports.")
@option("--stream", type=STREAM_NAME, help="With --endpoints: the stream's name.")
@option("--ca", type=_FILE, help="PEM file of the CA that the nodes' certificates chain to.")
@option(
    "--cert",
    type=_FILE,
    help="PEM file of our certificate, of role subscriber: what is not exported is held.",
)
@option("--key", type=_FILE, help="PEM file of its private key.")
@option("--once", is_flag=True, help="Stop when everything is exported that is there now.")
@option("--status", "only_status", is_flag=True, help="Only say how far the export to TARGET is.")
@option(
    "--part-mb", type=click.IntRange(min=1), default=256, show_default=True, help="Of the log, in one part."
)
@option(
    "--linger-seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="How long a smaller part waits for more.",
)
@option("--skip-lost", is_flag=True, help="Go on without messages that cannot be had any more.")
@option("--master", help="Spark's master; default: what spark-submit says, or all cores of this machine.")
@option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark's, or spark.hadoop....; repeatable.",
)
@json_option
def export(
    target: str,
    path: str | None,
    endpoints: str | None,
    stream: str | None,
    ca: str | None,
    cert: str | None,
    key: str | None,
    once: bool,
    only_status: bool,
    part_mb: int,
    linger_seconds: float,
    skip_lost: bool,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a merged log to TARGET as Parquet, partitioned by date and topic, each message once.

    TARGET is a directory, or a URL of Hadoop's (hdfs://..., s3a://...). What was exported is seen part by
    part, and stays so however this ends; started again it goes on behind it. From nodes, whatever is not
    exported is held back from being trimmed, within their limits, under the name of the certificate. One
    line a part tells of the progress. It needs the extra spark, and Java.
    """
    given = {"path": path, "endpoints": endpoints, "stream": stream, "ca": ca, "cert": cert, "key": key}
    settings = [_setting(each) for each in conf]
    if only_status:
        if any(given.values()):
            raise click.UsageError("--status wants TARGET alone.")
        with _target(target, master, settings) as (found, _):
            _show_status(found, as_json=as_json)
        return
    what = _settings(given, part_mb, linger_seconds, skip_lost=skip_lost)
    with (
        Interrupts() as interrupts,
        _target(target, master, settings, must_have_spark=True) as (found, spark),
    ):
        from rt.spark.exporting import Exporter

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


def part_text(part: Part) -> str:
    """A line about a part."""
    lost = part.end - part.start - part.rows
    return (
        f"exported up to position {part.end:,}: {part.rows:,} messages from {part.start:,} on"
        f"{f' ({lost:,} are lost)' if lost else ''}, {len(part.moves)} files, "
        f"{part.log_end - part.end:,} behind"
    )


def part_object(part: Part) -> dict[str, Any]:
    """The same for machines."""
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
        click.echo(f"{part_text(part)} at {format_time(part.time_ns, digits=0)}{left}".replace(".Z", "Z"))


def _settings(
    given: dict[str, str | None], part_mb: int, linger_seconds: float, *, skip_lost: bool
) -> ExportSettings:
    from rt.spark.exporting import ExportSettings
    from rt.spark.options import Nodes, parse_options

    where = parse_options({name: value for name, value in given.items() if value}).where
    hold = None
    if isinstance(where, Nodes):
        from rt.net.tls import TLS

        identity = TLS(ca=where.ca, cert=where.cert, key=where.key).identity
        if identity.role != "subscriber":
            raise RtError(
                "only for a subscriber the nodes hold anything back",
                where=where.cert,
                got=identity.uri,
                wanted="a certificate of role subscriber",
            )
        hold = identity.name
    return ExportSettings(where, hold, part_mb * 2**20, linger_seconds, skip_lost)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise click.UsageError(f"--conf {escape(text)}: give a name that begins with spark., and a value.")
    return name, value


@contextlib.contextmanager
def _target(
    target: str, master: str | None, settings: list[tuple[str, str]], *, must_have_spark: bool = False
) -> Iterator[tuple[ExportTarget, SparkSession | None]]:
    """The target, and a session where it, or what is to be done, wants one."""
    from rt.spark.export_target import ExportTarget
    from rt.spark.storage import is_local, open_storage

    if is_local(target) and not must_have_spark:
        yield ExportTarget(open_storage(target, None)), None
        return
    spark = spark_session("rt export", master, settings)
    try:
        yield ExportTarget(open_storage(target, spark)), spark
    finally:
        spark.stop()


def spark_session(name: str, master: str | None, settings: list[tuple[str, str]]) -> SparkSession:
    """A session; its workers run this Python."""
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise RtError("pyspark is not installed", hint="pip install 'rt-transport[spark]'") from error
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf()
    for setting, value in (
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.python.unix.domain.socket.enabled", "true"),
    ):
        conf.setIfMissing(setting, value)
    conf.setAll(settings)
    if master is not None:
        conf.setMaster(master)
    conf.setIfMissing("spark.master", "local[*]")
    conf.setIfMissing("spark.app.name", name)
    return SparkSession.builder.config(conf=conf).getOrCreate()
