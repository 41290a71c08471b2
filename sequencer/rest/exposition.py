"""Metrics as values, and as Prometheus reads them: its text format 0.0.4. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from sequencer.rest.node_view import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Value: TypeAlias = float | Histogram
"""A number; of a histogram its observations."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A sample is told by the values of its labels."""

    name: str
    kind: Kind
    unit: str
    """What is counted or measured, in full; "0 or 1" for what is so or not."""
    help: str
    labels: tuple[str, ...] = ()
    samples: Mapping[tuple[str, ...], Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for values in self.samples:
            assert len(values) == len(self.labels), (self.name, values)


def gauge(name: str, unit: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return Metric(name, "gauge", unit, text, (), {(): value})


def counter(name: str, unit: str, text: str, value: float) -> Metric:
    """A counter without labels."""
    return Metric(name, "counter", unit, text, (), {(): value})


def exposition(found: Iterable[Metric]) -> str:
    """The text."""
    lines: list[str] = []
    for metric in found:
        lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for values, value in metric.samples.items():
            labels = dict(zip(metric.labels, values, strict=True))
            if isinstance(value, Histogram):
                lines += _histogram(metric.name, labels, value)
            else:
                lines.append(_sample(metric.name, labels, value))
    return "\n".join(lines) + "\n"


def table(found: Sequence[Metric]) -> str:
    """The metrics as a table in Markdown, for people."""
    lines = ["| metric | type | unit | labels | what it tells |", "|---|---|---|---|---|"]
    for one in found:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{one.name}` | {one.kind} | {one.unit} | {labels} | {one.help} |")
    return "\n".join(lines) + "\n"


def _histogram(name: str, labels: Mapping[str, str], value: Histogram) -> Iterator[str]:
    below = 0
    for bound, count in zip((*map(_number, value.bounds), "+Inf"), value.counts, strict=True):
        below += count
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, below)
    yield _sample(f"{name}_sum", labels, value.total)
    yield _sample(f"{name}_count", labels, below)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{key}="{_escaped(text, quote=True)}"' for key, text in labels.items())
    braces = f"{{{told}}}" if told else ""
    return f"{name}{braces} {_number(value)}"


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(value)


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
