"""Observables to start a query with, by their Rx names. See also `Source`.

`merge`, `concat`, `zip`, `combine_latest` and `catch` are functions of the operators with these names.
"""

from __future__ import annotations

from typing import Any

from rt.query.core.observable import Observable
from rt.query.operators.combine import combined, merged, zipped
from rt.query.operators.concat import caught, chained
from rt.query.operators.generators import empty, interval, never, of, range, return_value, throw, timer
from rt.query.operators.user_functions import sources_of

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
    """The values of all sources, as they arrive."""
    return merged(sources_of("merge", sources))


def concat(*sources: Observable[Any]) -> Observable[Any]:
    """The values of the first source. When it completes, those of the second, and so on."""
    return chained(sources_of("concat", sources))


def zip(*sources: Observable[Any]) -> Observable[Any]:
    """Tuples of the first values of all sources, then of the second values, and so on."""
    return zipped(sources_of("zip", sources))


def combine_latest(*sources: Observable[Any]) -> Observable[Any]:
    """At every value, a tuple of the last values of all sources."""
    return combined(sources_of("combine_latest", sources))


def catch(*sources: Observable[Any]) -> Observable[Any]:
    """The values of the first source. When it fails, those of the second, and so on."""
    return caught(sources_of("catch", sources))
