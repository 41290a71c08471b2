"""`python -m chaos.soak_cli`: messages under random faults, and every promise verified. Figures go to
stdout.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

import click

from chaos.soak import Soak
from chaos.soak_faults import KINDS, Kind
from rt.cli.commands.bench import directory_option, json_option, show_all
from sequencer.bench.cli import nodes_option


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
    show_all(run.figures(), as_json=as_json)


if __name__ == "__main__":
    soak()
