"""Taps on sources, and inner subscriptions to them, over crashes."""

from __future__ import annotations

from typing import Any

import pytest

from rt.query.core.observable import Observable, applied
from rt.query.core.operator import Operator
from rt.query.core.source import Source
from rt.query.operators import flat_map, switch_map
from rt.query.operators import map as mapped
from rt.query.operators.creation import merge
from rt.testing.queries import check_laws, hot


@pytest.mark.parametrize("nested_first", [True, False])
def test_inner_subscriptions_to_a_source_keep_their_place_over_crashes(nested_first: bool) -> None:
    tens = Source("in").pipe(flat_map(lambda v: Source("in").pipe(mapped(lambda x: 10 * v + x))))
    check_laws(merge(*(tens, Source("in"))[:: 1 if nested_first else -1]), {"in": hot("12345|")})
    check_laws(Source("in").pipe(switch_map(lambda v: Source("in"))), {"in": hot("1234|")})


class Opens(Operator[Any, Any]):
    __slots__ = ()
    NAME = "opens"

    def on_next(self, value: Any, /) -> None:
        self.open_child(value)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return Source("in")


@pytest.mark.parametrize("key", ["a/b", "a#b"])
def test_a_key_that_would_make_an_ambiguous_id_is_refused(key: str) -> None:
    (event,) = check_laws(Source("in").pipe(applied(Opens)), {"in": hot("k", {"k": key})})
    assert isinstance(event.value, ValueError)
