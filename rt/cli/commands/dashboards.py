"""`rt dashboards`: write the Grafana dashboard and the Prometheus alert rules that come with rt."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

import click

from rt.cli.formats.new_files import write_new_files
from rt.cli.options import option

FILES: Final = {"rt.json": "dashboards", "rt.rules.yaml": "alerts"}
"""Each file, and the folder of `helm/` in which it is kept in a checkout."""


@click.command()
@option(
    "--out",
    "directory",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write to. It is created if it does not exist.",
)
@option("--force", is_flag=True, help="Replace files that exist and differ. Default: fail.")
def dashboards(directory: Path, force: bool) -> None:
    """Write the Grafana dashboard (rt.json) and the Prometheus alert rules (rt.rules.yaml).

    Import rt.json into Grafana, and name rt.rules.yaml under rule_files in Prometheus.
    """
    write_new_files({directory / name: monitoring_file(name) for name in FILES}, force=force)


def monitoring_file(name: str) -> bytes:
    """Read one of `FILES`: from the installed package, or from `helm/` in a checkout."""
    installed = resources.files("rt.cli").joinpath("monitoring", name)
    if installed.is_file():
        return installed.read_bytes()
    return (Path(__file__).parents[3] / "helm" / FILES[name] / name).read_bytes()
