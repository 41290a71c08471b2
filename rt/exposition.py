"""Metrics as values, and their Prometheus text format 0.0.4. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import force_setattr

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CONDITION: Final = "0 or 1"
"""The unit of a metric that shows whether a condition is true."""
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


class Histogram(Struct, frozen=True):
    """`counts[i]` observations are in (bounds[i-1], bounds[i]]; the last count is of observations above all
    bounds.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


Value: TypeAlias = float | Histogram
"""A number, or the observations of a histogram."""


class Metric(Struct, frozen=True):
    """One metric. The keys of `samples` are label values, in the order of `labels`."""

    name: str
    """Ends in `_total` if it is a counter."""
    help: str
    labels: tuple[str, ...] = ()
    samples: Mapping[tuple[str, ...], Value] = field(default_factory=dict)
    unit: str = ""
    """The unit in full; `CONDITION` for a condition. Default: the last word of the metric's name."""

    def __post_init__(self) -> None:
        for values in self.samples:
            assert len(values) == len(self.labels), (self.name, values)
        if not self.unit:
            force_setattr(self, "unit", self.name.removesuffix("_total").rpartition("_")[2])

    @property
    def kind(self) -> Kind:
        if any(isinstance(value, Histogram) for value in self.samples.values()):
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def number(name: str, text: str, value: float, *, unit: str = "") -> Metric:
    """A metric without labels."""
    return Metric(name, text, (), {(): value}, unit)


def condition(name: str, text: str, is_so: bool) -> Metric:
    """A metric without labels that is 1 or 0."""
    return number(name, text, is_so, unit=CONDITION)


def exposition(found: Iterable[Metric]) -> str:
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


def _histogram(name: str, labels: Mapping[str, str], value: Histogram) -> Iterator[str]:
    below = 0
    for bound, count in zip((*map(_number, value.bounds), "+Inf"), value.counts, strict=True):
        below += count
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, below)
    yield _sample(f"{name}_sum", labels, value.total)
    yield _sample(f"{name}_count", labels, below)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text, quote=True)}"' for key, text in labels.items())
    braces = f"{{{pairs}}}" if pairs else ""
    return f"{name}{braces} {_number(value)}"


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(value)


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
