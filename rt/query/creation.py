"""Observables to begin a query with, by the names that users of Rx know, besides `Source`.

`merge`, `concat`, `zip`, `combine_latest` and `catch` are the operators of these names.
"""

from __future__ import annotations

from typing import Any

from rt.query.observing import Observable
from rt.query.operators.asking import sources_of
from rt.query.operators.chaining import caught, chained
from rt.query.operators.combining import combined, merged, zipped
from rt.query.operators.creating import empty, interval, never, of, range, return_value, throw, timer

__all__ = [
    "catch",
    "combine_latest",
    "concat",
    "empty",
    "interval",
    "merge",
    "never",
    "of",
    "range",
    "return_value",
    "throw",
    "timer",
    "zip",
]


def merge(*sources: Observable[Any]) -> Observable[Any]:
    """The values of all sources as they come."""
    return merged(sources_of("merge", sources))


def concat(*sources: Observable[Any]) -> Observable[Any]:
    """The values of the first source; when it completes, those of the second, and so on."""
    return chained(sources_of("concat", sources))


def zip(*sources: Observable[Any]) -> Observable[Any]:
    """The tuples of the first values of all sources, of the second ones, and so on."""
    return zipped(sources_of("zip", sources))


def combine_latest(*sources: Observable[Any]) -> Observable[Any]:
    """At every value, the tuple of the last values of all sources."""
    return combined(sources_of("combine_latest", sources))


def catch(*sources: Observable[Any]) -> Observable[Any]:
    """The values of the first source; when it fails, those of the second, and so on."""
    return caught(sources_of("catch", sources))
