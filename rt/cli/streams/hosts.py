"""`rt streams hosts`: the queues of stream hosts, from the metrics of all hosts together."""

from __future__ import annotations

import contextlib
import json
import math
import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPException
from typing import Final

import click
from msgspec import Struct, field, to_builtins

from rt.cli.formats.console import report
from rt.cli.formats.tables import escape, table
from rt.cli.options import FiniteRange, json_option, option
from rt.endpoints import check_endpoints
from rt.errors import RtError

_SAMPLE: Final = re.compile(r'(rt_streams_\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_BYTES_MAX: Final = 16 * 2**20
_HIGH_PRESSURE: Final = 0.9


class HostSubscription(Struct, order=True):
    """An explicit subscription. `subscription` is its name, the name of its consumer, or its id."""

    stream: str
    subscription: str
    state: str
    lag: int


class HostQueue(Struct):
    """One queue of a provider: its owner and its state."""

    provider: str
    queue: str
    owner: str = ""
    consumers: int = 0
    behind: int = 0
    slow: int = 0
    failing: int = 0
    stuck: int = 0
    faulted: int = 0
    unattended: int = 0
    low: int = 0
    lag: int = 0
    pressure: float = 0.0
    is_paused: bool = False
    problems: list[str] = field(default_factory=list)
    subscriptions: list[HostSubscription] = field(default_factory=list)


_FIELDS: Final[Mapping[str, str]] = {
    "rt_streams_slow_consumers": "slow",
    "rt_streams_failing_consumers": "failing",
    "rt_streams_stuck_consumers": "stuck",
    "rt_streams_acknowledged_position": "low",
    "rt_streams_lag_events": "lag",
    "rt_streams_cache_fill_ratio": "pressure",
}
_STATES: Final[Mapping[str, str]] = {
    "served": "consumers",
    "behind": "behind",
    "faulted": "faulted",
    "unattended": "unattended",
}


def overview(texts: Iterable[str]) -> list[HostQueue]:
    """The queues in the metrics of these hosts, each as its owner reports it, with its problems."""
    samples = [found for text in texts for found in _samples(text)]
    rows: dict[tuple[str, str], HostQueue] = {}
    owners: dict[tuple[str, str], list[str]] = {}
    for name, labels, value in samples:
        place = (labels["provider"], labels["queue"])
        row = rows.setdefault(place, HostQueue(*place))
        if name == "rt_streams_queue_owned" and value:
            owners.setdefault(place, []).append(labels["host"])
        if name == "rt_streams_queue_failed" and value:
            row.problems.append(f"its agent on {labels['host']} failed and will be restarted")
    for name, labels, value in samples:
        place = (labels["provider"], labels["queue"])
        if labels["host"] not in owners.get(place, []):
            continue
        if name == "rt_streams_stuck_call_age_seconds":
            rows[place].problems.append(
                f"the consumer of {labels.get('stream')} has not got past an event for {value:,.0f} s "
                f"(subscription {labels.get('subscription')})"
            )
        if name == "rt_streams_subscription_lag_events":
            rows[place].subscriptions.append(
                HostSubscription(
                    labels.get("stream", ""),
                    labels.get("subscription", ""),
                    labels.get("state", ""),
                    int(value),
                )
            )
        if name == "rt_streams_queue_paused":
            rows[place].is_paused = bool(value)
        attribute = _FIELDS.get(name)
        if name == "rt_streams_consumers":
            attribute = _STATES.get(labels.get("state", ""))
        if attribute is not None:
            setattr(rows[place], attribute, value if attribute == "pressure" else int(value))
    for place, row in rows.items():
        _judge(row, owners.get(place, []))
    return [rows[place] for place in sorted(rows)]


def _judge(row: HostQueue, owners: Sequence[str]) -> None:
    row.owner = ", ".join(sorted(owners))
    if not owners:
        row.problems.append("none of these hosts serves it")
    if len(owners) > 1:
        row.problems.append("its owner changed during this command: run it again")
    if row.is_paused:
        row.problems.append("it is paused: its consumers get nothing until `rt streams queues resume`")
    elif row.pressure >= _HIGH_PRESSURE:
        row.problems.append("its cache is full: nothing is read until consumers have caught up")
    if row.failing:
        row.problems.append(f"{row.failing} consumers reject their events")
    if row.faulted:
        row.problems.append(f"{row.faulted} subscriptions are stopped (faulted): resume or end them")
    if row.unattended:
        row.problems.append(f"{row.unattended} subscriptions have no consumer on this host")


def _samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    for line in text.split("\n"):
        if (found := _SAMPLE.fullmatch(line)) is not None:
            labels = {name: _unescaped(value) for name, value in _LABEL.findall(found[2])}
            with contextlib.suppress(ValueError):
                value = float(found[3])
                if {"provider", "host", "queue"} <= labels.keys() and math.isfinite(value):
                    yield found[1], labels, value


def _unescaped(value: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value)


def ask(endpoint: str, timeout_s: float) -> str:
    """The metrics of the host at `host:port`; `rt.RtError` if it does not answer within `timeout_s`."""
    url = f"http://{endpoint}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return str(answer.read(_BYTES_MAX).decode())
    except (OSError, ValueError, HTTPException) as error:
        hint = "Check that serve_metrics runs there."
        raise RtError(
            "the host does not serve metrics", where=endpoint, got=str(error)[:200], hint=hint
        ) from error


def as_table(rows: Sequence[HostQueue]) -> str:
    """The problems, a table of the queues, and one of the explicit subscriptions."""
    names, numbers = ("provider", "queue", "owner"), ("consumers", "behind", "slow", "low", "lag", "pressure")
    body = [
        [
            escape(row.provider),
            escape(row.queue),
            escape(row.owner) or "none",
            *(f"{number:,}" for number in (row.consumers, row.behind, row.slow, row.low, row.lag)),
            f"{row.pressure:.0%}",
        ]
        for row in rows
    ]
    explicit = [
        [
            *map(escape, (row.provider, row.queue, one.stream, one.subscription, one.state)),
            f"{one.lag:,}",
        ]
        for row in rows
        for one in sorted(row.subscriptions)
    ]
    listed = [
        "",
        *table((*names[:2], "stream", "subscription", "state", "lag"), explicit, right=frozenset({"lag"})),
    ]
    problems = [escape(f"  {row.queue}: {problem}") for row in rows for problem in row.problems]
    queues = table((*names, *numbers), body, right=frozenset(numbers))
    return "\n".join([*problems, *queues, *(listed if explicit else ())])


@click.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST:PORT...")
@option("--timeout", default=5.0, type=FiniteRange(0.1, 300), help="Timeout for each host. Seconds.")
@json_option
@click.pass_context
def hosts(ctx: click.Context, hosts: Sequence[str], timeout: float, as_json: bool) -> None:
    """Show the queues of stream hosts: owners, consumers, lag, pressure; and the explicit subscriptions.

    Of each queue the hundred explicit subscriptions are shown that lag most: `rt streams subscriptions list`
    shows all, without asking hosts. HOST:PORT is where a host serves its metrics. Exit status 1 means that a
    host does not answer or that a queue has a problem.
    """
    texts, has_failed = [], False
    for host in check_endpoints(hosts, where="HOST:PORT"):
        try:
            texts.append(ask(host, timeout))
        except RtError as error:
            has_failed = True
            report(error)
    rows = overview(texts)
    if as_json:
        for row in rows:
            click.echo(json.dumps(to_builtins(row)))
    elif rows:
        click.echo(as_table(rows))
    if has_failed or any(row.problems for row in rows):
        ctx.exit(1)
