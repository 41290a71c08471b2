"""Examples of every operator: a query of the source "in", what the source sends, and the outcome."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import add
from typing import Any

from rt.query import Observable, Observer, Operator, Source
from rt.query import operators as ops
from rt.query.core.operator_group import OperatorGroup
from rt.query.operators import creation
from rt.testing.queries import MarbleError, MarbleEvent, cold, until


class Input(Source):
    """The source "in". Inside a group for which `Example` sets other events, it sends those events."""

    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        events = INPUTS.get("/".join(group.id.split("/")[:2]))
        return super().build(group, out) if events is None else events.build(group, out)


class Example(Observable[Any]):
    """A query in which other events replace the source "in", for a group of a query."""

    def __init__(self, query: Observable[Any], events: Observable[Any]) -> None:
        self._query = query
        self._events = events

    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        INPUTS[group.id] = self._events
        return self._query.build(group, out)


INPUTS: dict[str, Observable[Any]] = {}
"""The events that replace the source "in", by the id of the operator group of a group."""

IN = Input("in")
OTHER = Source("other")
NEVER = creation.never()


def outcome(events: list[MarbleEvent]) -> str:
    """Return the values and the end, without times."""
    marks = {"completed": "|", "error": "#"}
    return " ".join(marks.get(event.kind) or str(event.value) for event in events)


def listed(window: Observable[Any]) -> Observable[Any]:
    return window.pipe(ops.to_list())


def keyed(group: Any) -> Observable[Any]:
    """The key of a group and its values."""
    return group.pipe(ops.to_list(), ops.map(lambda values: f"{group.key}:{values}"))  # type: ignore[no-any-return]


def echo(value: Any) -> Observable[Any]:
    return cold(f"-{value}-{value}|")


async def later(value: int) -> int:
    """Return the value. The greater it is, the earlier the result; no two results come at once."""
    await until(9.5 - 2 * value)
    return value


async def failing_at_2(value: int) -> int:
    await until(9.5 - 2 * value)
    return value // (value != 2)


def odd(value: int) -> bool:
    return value % 2 == 1


def values() -> Any:
    """Map windows of event time to their values."""
    return ops.map(lambda window: window["value"])


EXAMPLES: dict[str, list[tuple[Observable[Any], str, str]]] = {
    "all": [(IN.pipe(ops.all(lambda x: x < 3)), "12|", "True |"), (IN.pipe(ops.all(bool)), "10|", "False |")],
    "amb": [
        (IN.pipe(ops.amb(cold("-7--8|"), cold("--9|"))), "--1|", "7 8 |"),
        (IN.pipe(ops.amb(cold("-7|"))), "1-2|", "1 2 |"),
        (IN.pipe(ops.amb(cold("-7|"))), "|", "|"),
        (IN.pipe(ops.amb(cold("-7|"))), "#", "#"),
        (creation.amb(IN), "12|", "1 2 |"),
        (creation.amb(creation.never(), IN, IN), "1#", "1 #"),
    ],
    "append": [(IN.pipe(ops.append(8, 9)), "1|", "1 8 9 |"), (IN.pipe(ops.append(8)), "1#", "1 #")],
    "average": [(IN.pipe(ops.average()), "136|", "3.3333333333333335 |"), (IN.pipe(ops.average()), "|", "#")],
    "buffer_toggle": [
        (
            IN.pipe(ops.buffer_toggle(cold("a--b|"), lambda x: cold("-----|" if x == "a" else "-x"))),
            "-1234567|",
            "[3] [1, 2, 3, 4] |",
        ),
        (IN.pipe(ops.buffer_toggle(cold("a"), lambda _: creation.never())), "-12|", "[1, 2] |"),
        (IN.pipe(ops.buffer_toggle(cold("a"), lambda _: creation.never())), "-12#", "#"),
    ],
    "buffer_when": [
        (IN.pipe(ops.buffer_when(lambda: cold("--x"))), "-1234|", "[1] [2, 3] [4] |"),
        (IN.pipe(ops.buffer_when(lambda: cold("---|"))), "-1234|", "[1, 2] [3, 4] |"),
    ],
    "buffer_with_count": [
        (IN.pipe(ops.buffer_with_count(3)), "1234567|", "[1, 2, 3] [4, 5, 6] [7] |"),
        (IN.pipe(ops.buffer_with_count(3, 1)), "1234|", "[1, 2, 3] [2, 3, 4] [3, 4] [4] |"),
        (IN.pipe(ops.buffer_with_count(2, 3)), "1234567|", "[1, 2] [4, 5] [7] |"),
        (IN.pipe(ops.buffer_with_count(3)), "12#", "#"),
    ],
    "buffer_with_time": [
        (IN.pipe(ops.buffer_with_time(2.5, 1.5)), "-12345|", "[] [1, 2] [2, 3] [3, 4, 5] [5] [] |"),
        (
            IN.pipe(ops.buffer_with_time(2.5, 1.5, aligned=False)),
            "-12345|",
            "[1, 2] [2, 3] [3, 4, 5] [5] [] |",
        ),
        (IN.pipe(ops.buffer_with_time(3, offset=1)), "012345|", "[0] [1, 2, 3] [4, 5] |"),
        (IN.pipe(ops.buffer_with_time(2.5)), "-1-23---4|", "[1] [2, 3] [] [4] |"),
    ],
    "buffer_with_time_or_count": [
        (IN.pipe(ops.buffer_with_time_or_count(2.5, 2)), "-123--4|", "[1, 2] [] [3] [4] |"),
        (
            IN.pipe(ops.buffer_with_time_or_count(2.5, 2, aligned=False)),
            "-123--4|",
            "[1, 2] [3] [4] [] |",
        ),
    ],
    "catch": [
        (IN.pipe(ops.catch(cold("-8-9|"))), "12#", "1 2 8 9 |"),
        (IN.pipe(ops.catch(lambda why: creation.of(why.kind, why.text))), "1#", "1 MarbleError # |"),
        (creation.catch(cold("1#"), cold("2#"), cold("3#")), "", "1 2 3 #"),
    ],
    "combine_latest": [
        (
            IN.pipe(ops.combine_latest(cold("--a-b|"))),
            "1-2-3--4|",
            "(1, 'a') (2, 'a') (2, 'b') (3, 'b') (4, 'b') |",
        ),
        (creation.combine_latest(IN), "1|", "(1,) |"),
    ],
    "concat": [
        (IN.pipe(ops.concat(cold("-8|"), creation.of(9))), "12|", "1 2 8 9 |"),
        (creation.concat(creation.of(1), IN), "-2|", "1 2 |"),
    ],
    "concat_map": [(IN.pipe(ops.concat_map(echo)), "123|", "1 1 2 2 3 3 |")],
    "contains": [(IN.pipe(ops.contains(2)), "123|", "True |"), (IN.pipe(ops.contains(4)), "123|", "False |")],
    "count_by": [
        (IN.pipe(ops.count_by(lambda x: x % 2)), "12345|", "{1: 3, 0: 2} |"),
        (IN.pipe(ops.count_by(lambda x: x, limit=2)), "12113|", "#"),
        (IN.pipe(ops.count_by(lambda x: x)), "|", "{} |"),
    ],
    "count": [(IN.pipe(ops.count()), "123|", "3 |"), (IN.pipe(ops.count(lambda x: x > 1)), "123|", "2 |")],
    "debounce": [(IN.pipe(ops.debounce(1.5)), "12--34---5|", "2 4 5 |")],
    "default_if_empty": [
        (IN.pipe(ops.default_if_empty(9)), "--|", "9 |"),
        (IN.pipe(ops.default_if_empty(9)), "1|", "1 |"),
    ],
    "delay": [(IN.pipe(ops.delay(2.5)), "12-3|", "1 2 3 |"), (IN.pipe(ops.delay(1)), "12#", "1 2 #")],
    "delay_subscription": [(IN.pipe(ops.delay_subscription(1.5)), "1234|", "3 4 |")],
    "dematerialize": [
        (IN.pipe(ops.materialize(), ops.dematerialize()), "12|", "1 2 |"),
        (IN.pipe(ops.materialize(), ops.dematerialize()), "12#", "1 2 #"),
        (IN.pipe(ops.dematerialize()), "1|", "#"),
    ],
    "distinct": [
        (IN.pipe(ops.distinct(lambda x: x % 3)), "14251|", "1 2 |"),
        (IN.pipe(ops.distinct(lambda x: (x // 9, float("nan")))), "12345|", "1 |"),
        (IN.pipe(ops.distinct(ttl=3)), "1211----12--2|", "1 2 1 2 |"),
        (IN.pipe(ops.distinct(lambda x: [x], ttl=3)), "12|", "#"),
    ],
    "distinct_until_changed": [(IN.pipe(ops.distinct_until_changed()), "1121|", "1 2 1 |")],
    "do_action": [(IN.pipe(ops.do_action(lambda x: 1 / (x - 3))), "123|", "1 2 #")],
    "element_at": [(IN.pipe(ops.element_at(1)), "123|", "2 |"), (IN.pipe(ops.element_at(3)), "1|", "#")],
    "element_at_or_default": [(IN.pipe(ops.element_at_or_default(3, 9)), "12|", "9 |")],
    "empty": [(creation.empty(), "", "|")],
    "filter_indexed": [(IN.pipe(ops.filter_indexed(lambda _, i: i % 2)), "1234|", "2 4 |")],
    "finally_action": [(IN.pipe(ops.finally_action(lambda: None)), "12|", "1 2 |")],
    "first": [(IN.pipe(ops.first(lambda x: x > 1)), "123|", "2 |"), (IN.pipe(ops.first()), "|", "#")],
    "first_or_default": [(IN.pipe(ops.first_or_default(default_value=9)), "-|", "9 |")],
    "flat_map": [
        (IN.pipe(ops.flat_map(echo)), "1--2|", "1 1 2 2 |"),
        (IN.pipe(ops.flat_map(echo, max_concurrent=2)), "123|", "1 2 1 2 3 3 |"),
        (IN.pipe(ops.flat_map(lambda x: cold("-#"))), "1|", "#"),
        (IN.pipe(ops.flat_map(lambda x: creation.of(1 // x))), "10|", "1 #"),
    ],
    "flat_map_indexed": [(IN.pipe(ops.flat_map_indexed(lambda x, i: cold(f"-{x + i}|"))), "123|", "1 3 5 |")],
    "group_by": [
        (IN.pipe(ops.group_by(lambda x: x % 2), ops.flat_map(keyed)), "12345|", "1:[1, 3, 5] 0:[2, 4] |"),
        (IN.pipe(ops.group_by(lambda x: x % 2), ops.take(1), ops.flat_map(keyed)), "12345|", "1:[1, 3, 5] |"),
        (IN.pipe(ops.group_by(lambda x: 1 // x), ops.merge_all()), "10|", "1 #"),
        (IN.pipe(ops.group_by(lambda _: float("nan")), ops.flat_map(keyed)), "123|", "nan:[1, 2, 3] |"),
        (
            IN.pipe(ops.group_by(lambda x: x % 3, ttl=4.5), ops.flat_map(keyed)),
            "1214---471|",
            "2:[2] 1:[1, 1, 4, 4, 7, 1] |",
        ),
        (
            IN.pipe(ops.group_by(lambda x: x % 3, ttl=3.5), ops.flat_map(keyed)),
            "12-1----47|",
            "2:[2] 1:[1, 1] 1:[4, 7] |",
        ),
        (IN.pipe(ops.group_by(str, ttl=3.5), ops.take(1), ops.flat_map(keyed)), "12-1----4|", "1:[1, 1] |"),
    ],
    "group_by_until": [
        (
            IN.pipe(ops.group_by_until(lambda x: x % 2, None, lambda _: cold("--x")), ops.flat_map(keyed)),
            "13-235|",
            "1:[1, 3] 0:[2] 1:[3, 5] |",
        ),
        (
            IN.pipe(
                ops.group_by_until(lambda x: x % 2, lambda x: -x, lambda group: group.pipe(ops.skip(1))),
                ops.flat_map(keyed),
            ),
            "123456|",
            "1:[-1, -3] 0:[-2, -4] 1:[-5] 0:[-6] |",
        ),
        (
            IN.pipe(
                ops.group_by_until(lambda x: x % 2, None, lambda group: group.pipe(ops.skip(2))),
                ops.take(1),
                ops.flat_map(keyed),
            ),
            "1235777|",
            "1:[1, 3, 5] |",
        ),
        (IN.pipe(ops.group_by_until(lambda x: x, None, lambda x: 1 // 0), ops.merge_all()), "1|", "#"),
    ],
    "group_join": [
        (
            IN.pipe(
                ops.group_join(cold("-7-8-9"), lambda _: cold("---|"), lambda _: cold("--|")),
                ops.flat_map(keyed),
            ),
            "1--2|",
            "1:[7] 2:[8, 9] |",
        ),
        (
            IN.pipe(
                ops.group_join(cold("-7-8-9"), lambda _: cold("-----|"), lambda _: cold("--|")),
                ops.take(1),
                ops.flat_map(keyed),
            ),
            "1--2|",
            "1:[7, 8] |",
        ),
        (
            IN.pipe(ops.group_join(cold("-#"), lambda _: IN, lambda _: IN), ops.merge_all()),
            "1--2|",
            "#",
        ),
    ],
    "ignore_elements": [(IN.pipe(ops.ignore_elements()), "12|", "|")],
    "in_time_order": [
        (IN.pipe(ops.in_time_order()), "12-3|", "1 2 3 |"),
        (IN.pipe(ops.in_time_order(cold("-8-9|"))), "12-3#", "1 2 8 3 9 #"),
    ],
    "interval": [
        (creation.interval(1.5).pipe(ops.take(3)), "", "0 1 2 |"),
        (IN.pipe(ops.flat_map(lambda _: creation.interval(2, aligned=True).pipe(ops.take(1)))), "-1|", "0 |"),
    ],
    "interval_join": [
        (
            IN.pipe(ops.interval_join(cold("-5-1|"), left_key=odd, right_key=odd, before=2, after=1)),
            "123|",
            "(1, 5) (3, 5) (3, 1) |",
        ),
        (
            IN.pipe(ops.interval_join(cold("--1-2|"), left_key=odd, right_key=odd, after=1, keep="all")),
            "-123---|",
            "(1, 1) (2, None) (3, None) (None, 2) |",
        ),
    ],
    "is_empty": [(IN.pipe(ops.is_empty()), "--|", "True |"), (IN.pipe(ops.is_empty()), "-1|", "False |")],
    "join": [
        (
            IN.pipe(ops.join(cold("-ab-c|"), lambda _: cold("--x"), lambda _: cold("-|"))),
            "1-2-3|",
            "(1, 'a') (2, 'b') (2, 'c') (3, 'c') |",
        ),
        (IN.pipe(ops.join(cold("a"), lambda _: cold("9"), lambda _: cold("--|"))), "-12--3|", "(1, 'a') |"),
        (IN.pipe(ops.join(cold("a"), lambda _: cold("#"), lambda _: cold("--|"))), "12|", "(1, 'a') #"),
        (IN.pipe(ops.join(cold("ab"), lambda _: NEVER, lambda _: NEVER, limit=2)), "12|", "(1, 'a') #"),
        (IN.pipe(ops.join(cold("a"), lambda x: x, lambda x: x)), "-1|", "#"),
    ],
    "last": [(IN.pipe(ops.last()), "12|", "2 |"), (IN.pipe(ops.last(lambda x: x > 2)), "12|", "#")],
    "last_or_default": [(IN.pipe(ops.last_or_default(9)), "|", "9 |")],
    "map": [(IN.pipe(ops.map(lambda x: 6 // (3 - x))), "123|", "3 6 #")],
    "map_async": [
        (IN.pipe(ops.map_async(later)), "123|", "1 2 3 |"),
        (IN.pipe(ops.map_async(later, ordered=False)), "123|", "3 2 1 |"),
        (IN.pipe(ops.map_async(later, ordered=False, concurrency=2)), "123|", "2 3 1 |"),
        (IN.pipe(ops.map_async(later, concurrency=1)), "123", "1 2 3"),
        (IN.pipe(ops.map_async(later), ops.take(1)), "123|", "1 |"),
        (IN.pipe(ops.map_async(failing_at_2)), "41|", "4 1 |"),
        (IN.pipe(ops.map_async(failing_at_2)), "42|", "4 #"),
        (IN.pipe(ops.map_async(failing_at_2, ordered=False)), "123|", "3 #"),
        (IN.pipe(ops.map_async(lambda x: x)), "123|", "#"),
        (IN.pipe(ops.flat_map(lambda x: creation.of(x, -x).pipe(ops.map_async(later)))), "1|", "1 -1 |"),
    ],
    "map_indexed": [(IN.pipe(ops.map_indexed(lambda x, i: x * i)), "123|", "0 2 6 |")],
    "materialize": [
        (IN.pipe(ops.materialize()), "1|", "('next', 1) ('completed', None) |"),
        (IN.pipe(ops.materialize()), "#", "('error', ('MarbleError', '#')) |"),
    ],
    "max": [
        (IN.pipe(ops.max()), "132|", "3 |"),
        (IN.pipe(ops.max(lambda x, y: x % 3 - y % 3)), "132|", "2 |"),
    ],
    "max_by": [
        (IN.pipe(ops.max_by(lambda x: x % 3)), "12453|", "[2, 5] |"),
        (IN.pipe(ops.max_by(lambda x: x, lambda x, y: y - x)), "213|", "[1] |"),
    ],
    "merge": [(IN.pipe(ops.merge(cold("-7--8|"))), "1-2|", "1 7 2 8 |"), (creation.merge(IN), "1|", "1 |")],
    "merge_all": [(IN.pipe(ops.window_with_count(2), ops.merge_all()), "123|", "1 2 3 |")],
    "min": [(IN.pipe(ops.min()), "213|", "1 |"), (IN.pipe(ops.min(lambda x, y: y - x)), "213|", "3 |")],
    "min_by": [
        (IN.pipe(ops.min_by(lambda x: x % 3)), "24173|", "[3] |"),
        (IN.pipe(ops.min_by(lambda x: x % 3)), "2417|", "[4, 1, 7] |"),
        (IN.pipe(ops.min_by(lambda x: x)), "|", "[] |"),
        (IN.pipe(ops.min_by(lambda x: 0, limit=1)), "12|", "#"),
        (IN.pipe(ops.min_by(lambda x: 1 // x)), "10|", "#"),
    ],
    "never": [(creation.never(), "", "")],
    "of": [(creation.of(1, 2), "", "1 2 |")],
    "on_error_resume_next": [
        (IN.pipe(ops.on_error_resume_next(cold("-7#"), cold("8|"))), "1#", "1 7 8 |"),
        (creation.on_error_resume_next(cold("1|"), cold("2#")), "", "1 2 |"),
    ],
    "pairwise": [(IN.pipe(ops.pairwise()), "123|", "(1, 2) (2, 3) |"), (IN.pipe(ops.pairwise()), "1|", "|")],
    "partition": [
        (creation.merge(*ops.partition(lambda x: x < 3)(IN)), "1324|", "1 3 2 4 |"),
        (ops.partition(lambda x: x < 3)(IN)[0], "1324|", "1 2 |"),
        (ops.partition(lambda x: x < 3)(IN)[1], "1324|", "3 4 |"),
    ],
    "range": [(creation.range(2, 9, 3), "", "2 5 8 |"), (creation.range(2), "", "0 1 |")],
    "reduce_by": [
        (IN.pipe(ops.reduce_by(lambda x: x % 2, max)), "12345|", "{1: 5, 0: 4} |"),
        (
            IN.pipe(ops.reduce_by(lambda x: x % 2, lambda seen, x: [*seen, x], [])),
            "123|",
            "{1: [1, 3], 0: [2]} |",
        ),
        (IN.pipe(ops.reduce_by(lambda x: [x], max)), "12|", "#"),
    ],
    "reduce": [(IN.pipe(ops.reduce(max)), "132|", "3 |"), (IN.pipe(ops.reduce(max, 9)), "|", "9 |")],
    "repeat": [(cold("-1|").pipe(ops.repeat(3)), "", "1 1 1 |"), (cold("1#").pipe(ops.repeat()), "", "1 #")],
    "retry": [(cold("-1#").pipe(ops.retry(2)), "", "1 1 #"), (cold("1|").pipe(ops.retry()), "", "1 |")],
    "return_value": [(creation.return_value(5), "", "5 |")],
    "sample": [
        (IN.pipe(ops.sample(2.5)), "-12-3---45|", "2 3 5 |"),
        (IN.pipe(ops.sample(3, offset=1)), "01234|", "0 3 4 |"),
        (IN.pipe(ops.sample(cold("-x|"))), "12-3|", "1 2 |"),
    ],
    "scan_by": [
        (IN.pipe(ops.scan_by(lambda x: x % 2, max)), "123|", "(1, 1) (0, 2) (1, 3) |"),
        (
            IN.pipe(ops.scan_by(lambda x: x % 2, lambda seen, x: seen + x, 10, ttl=3)),
            "12-3-----4|",
            "(1, 11) (0, 12) (1, 14) (0, 14) |",
        ),
        (IN.pipe(ops.scan_by(lambda x: x, lambda total, x: 1 // (x - 1), 0)), "21|", "(2, 1) #"),
    ],
    "scan": [
        (IN.pipe(ops.scan(lambda total, x: total + x)), "123|", "1 3 6 |"),
        (IN.pipe(ops.scan(lambda seen, x: [*seen, x], [])), "12|", "[1] [1, 2] |"),
    ],
    "sequence_equal": [
        (IN.pipe(ops.sequence_equal(cold("---12|"))), "12|", "True |"),
        (IN.pipe(ops.sequence_equal(cold("-1-2|"))), "1-3|", "False |"),
        (IN.pipe(ops.sequence_equal(cold("1|"))), "123|", "False |"),
        (IN.pipe(ops.sequence_equal(cold("----|"), limit=2)), "123|", "#"),
    ],
    "share": [
        (
            IN.pipe(
                ops.scan(add), ops.share(lambda each: each.pipe(ops.merge(each.pipe(ops.map(lambda x: -x)))))
            ),
            "12|",
            "1 -1 3 -3 |",
        ),
        (
            IN.pipe(
                ops.window_with_count(2),
                ops.share(
                    lambda each: creation.zip(each.pipe(ops.flat_map(listed)), each.pipe(ops.merge_all()))
                ),
            ),
            "1234|",
            "([1, 2], 1) ([3, 4], 2) ([], 3) |",
        ),
        (
            IN.pipe(ops.share(lambda it: it.pipe(ops.take(1), ops.concat(cold("--8|"))))),
            "12345|",
            "1 8 |",
        ),
        (IN.pipe(ops.share(lambda each: each.pipe(ops.merge(each)))), "1#", "1 1 #"),
    ],
    "session_window": [
        (IN.pipe(ops.session_window(2, ops.Fold.to_list()), values()), "12--3-45|", "[1, 2] [3] [4, 5] |"),
        (
            IN.pipe(ops.session_window(2.5, ops.Fold.sum(), key_mapper=odd), values()),
            "12-3--5|",
            "1 2 3 5 |",
        ),
    ],
    "single": [(IN.pipe(ops.single()), "1|", "1 |"), (IN.pipe(ops.single()), "12|", "#")],
    "single_or_default": [(IN.pipe(ops.single_or_default(lambda x: x > 2, 9)), "12|", "9 |")],
    "skip": [(IN.pipe(ops.skip(2)), "1234|", "3 4 |")],
    "skip_last": [
        (IN.pipe(ops.skip_last(2)), "1234|", "1 2 |"),
        (IN.pipe(ops.skip_last(0)), "12#", "1 2 #"),
    ],
    "skip_until": [
        (IN.pipe(ops.skip_until(cold("--x|"))), "1-2-3|", "2 3 |"),
        (IN.pipe(ops.skip_until(cold("|"))), "1|", "|"),
    ],
    "skip_until_with_time": [(IN.pipe(ops.skip_until_with_time(1.5)), "1234|", "3 4 |")],
    "skip_while": [(IN.pipe(ops.skip_while(lambda x: x < 3)), "1231|", "3 1 |")],
    "skip_while_indexed": [(IN.pipe(ops.skip_while_indexed(lambda x, i: i < 2)), "1234|", "3 4 |")],
    "skip_with_time": [(IN.pipe(ops.skip_with_time(1.5)), "1234|", "3 4 |")],
    "sliding_window": [
        (IN.pipe(ops.sliding_window(2, 1, ops.Fold.to_list()), values()), "123-|", "[1] [1, 2] [2, 3] [3] |"),
        (IN.pipe(ops.sliding_window(2, 2, ops.Fold(int, lambda x, y: x // y)), values()), "10|", "#"),
    ],
    "some": [(IN.pipe(ops.some(lambda x: x > 1)), "12|", "True |"), (IN.pipe(ops.some()), "|", "False |")],
    "starmap": [(IN.pipe(ops.pairwise(), ops.starmap(lambda x, y: x * y)), "123|", "2 6 |")],
    "start_with": [(IN.pipe(ops.start_with(8, 9)), "-1|", "8 9 1 |")],
    "sum": [(IN.pipe(ops.sum()), "123|", "6 |"), (IN.pipe(ops.sum(lambda x: -x)), "|", "0 |")],
    "switch_latest": [(IN.pipe(ops.window_with_count(2, 1), ops.switch_latest()), "123|", "1 2 3 |")],
    "switch_map": [
        (IN.pipe(ops.switch_map(echo)), "1--23|", "1 1 2 3 3 |"),
        # The windows of a closed inner subscription complete.
        (
            IN.pipe(ops.switch_map(lambda x: echo(x).pipe(ops.window_with_count(9))), ops.flat_map(listed)),
            "1-2|",
            "[1] [2, 2] |",
        ),
    ],
    "switch_map_indexed": [(IN.pipe(ops.switch_map_indexed(lambda x, i: echo(i))), "8--99|", "0 0 1 2 2 |")],
    "take": [
        (IN.pipe(ops.take(2)), "123|", "1 2 |"),
        (IN.pipe(ops.take(2)), "1|", "1 |"),
        (IN.pipe(ops.take(0)), "1|", "|"),
        (IN.pipe(ops.take(3)), "12#", "1 2 #"),
        (IN.pipe(ops.buffer_with_count(2), ops.take(1)), "12345|", "[1, 2] |"),
    ],
    "take_last": [
        (IN.pipe(ops.take_last(2)), "1234|", "3 4 |"),
        (IN.pipe(ops.take_last(2)), "1|", "1 |"),
        (IN.pipe(ops.take_last(0)), "12|", "|"),
        (IN.pipe(ops.take_last(2)), "12#", "#"),
    ],
    "take_until": [
        (IN.pipe(ops.take_until(cold("--x"))), "1-2-3|", "1 |"),
        (IN.pipe(ops.take_until(cold("|"))), "1|", "1 |"),
    ],
    "take_until_with_time": [(IN.pipe(ops.take_until_with_time(1.5)), "1234|", "1 2 |")],
    "take_while": [
        (IN.pipe(ops.take_while(lambda x: x < 3)), "1231|", "1 2 |"),
        (IN.pipe(ops.take_while(lambda x: x < 3, inclusive=True)), "1231|", "1 2 3 |"),
    ],
    "take_while_indexed": [(IN.pipe(ops.take_while_indexed(lambda x, i: i < 2)), "1234|", "1 2 |")],
    "take_with_time": [(IN.pipe(ops.take_with_time(1.5)), "1234|", "1 2 |")],
    "temporal_join": [
        (
            IN.pipe(ops.temporal_join(cold("1-3-|"), left_key=odd, table_key=odd)),
            "135-7|",
            "(1, 1) (3, 1) (5, 3) (7, 3) |",
        ),
        (
            IN.pipe(ops.temporal_join(cold("1-2-|"), left_key=odd, table_key=odd, ttl=1, keep="left")),
            "1234|",
            "(1, 1) (2, None) (3, None) (4, 2) |",
        ),
    ],
    "throttle_first": [(IN.pipe(ops.throttle_first(2)), "12-345-6|", "1 3 5 6 |")],
    "throttle_with_mapper": [
        (IN.pipe(ops.throttle_with_mapper(lambda x: cold("-|"))), "12--3-45|", "1 2 3 4 5 |")
    ],
    "throw": [(creation.throw(MarbleError("#")), "", "#")],
    "time_interval": [(IN.pipe(ops.time_interval()), "-1--2|", "(1, 1000000000) (2, 3000000000) |")],
    "timeout": [
        (IN.pipe(ops.timeout(2.5)), "1-2--3---4|", "1 2 #"),
        (IN.pipe(ops.timeout(2.5)), "1-2-|", "1 2 |"),
        (IN.pipe(ops.timeout(2.5, cold("-8-9|"))), "1---2|", "1 8 9 |"),
        (IN.pipe(ops.timeout(datetime.fromtimestamp(2.5, UTC), cold("8#"))), "123456|", "1 2 3 8 #"),
    ],
    "timer": [(creation.timer(1.5), "", "0 |"), (creation.timer(0, 2).pipe(ops.take(3)), "", "0 1 2 |")],
    "timestamp": [(IN.pipe(ops.timestamp()), "-1-2|", "(1, 1000000000) (2, 3000000000) |")],
    "to_dict": [
        (IN.pipe(ops.to_dict(lambda x: x % 3)), "1254|", "{1: 4, 2: 5} |"),
        (IN.pipe(ops.to_dict(lambda x: x, lambda x: -x)), "12|", "{1: -1, 2: -2} |"),
        (IN.pipe(ops.to_dict(lambda x: x, limit=1)), "112|", "#"),
        (IN.pipe(ops.to_dict(lambda x: [x])), "1|", "#"),
        (IN.pipe(ops.to_dict(lambda x: x, lambda x: 1 // x)), "10|", "#"),
    ],
    "tumbling_window": [
        (IN.pipe(ops.tumbling_window(3, ops.Fold.count(), key_mapper=odd), values()), "1234|", "1 2 1 |"),
        (IN.pipe(ops.tumbling_window(3, ops.Fold.to_list(), offset=1), values()), "1234|", "[1] [2, 3, 4] |"),
    ],
    "to_list": [(IN.pipe(ops.to_list()), "12|", "[1, 2] |"), (IN.pipe(ops.to_list(limit=1)), "12|", "#")],
    "to_set": [
        (IN.pipe(ops.to_set()), "1121|", "{1, 2} |"),
        (IN.pipe(ops.to_set(limit=1)), "112|", "#"),
        (IN.pipe(ops.map(lambda x: [x]), ops.to_set()), "1|", "#"),
    ],
    "where": [
        (IN.pipe(ops.where(lambda x: x % 2)), "123|", "1 3 |"),
        (cold("1234|").pipe(ops.where(lambda x: 12 // (3 - x))), "", "1 2 #"),
    ],
    "window_toggle": [
        (
            IN.pipe(ops.window_toggle(cold("a-|"), lambda _: cold("---|")), ops.merge_all()),
            "-12345|",
            "1 2 |",
        ),
        (
            IN.pipe(
                ops.window_toggle(cold("ab"), lambda _: cold("----|")), ops.take(1), ops.flat_map(listed)
            ),
            "-12345|",
            "[1, 2, 3] |",
        ),
        (IN.pipe(ops.window_toggle(cold("a"), lambda _: 1 // 0), ops.merge_all()), "-1|", "#"),
    ],
    "window_when": [
        (IN.pipe(ops.window_when(lambda: cold("--x")), ops.flat_map(listed)), "1234|", "[1, 2] [3, 4] [] |"),
        (
            IN.pipe(ops.window_when(lambda: cold("--x")), ops.take(2), ops.flat_map(listed)),
            "123456|",
            "[1, 2] [3, 4] |",
        ),
        (IN.pipe(ops.window_when(lambda: cold("--#")), ops.merge_all()), "1234|", "1 2 #"),
        (IN.pipe(ops.window_when(lambda: 1 // 0), ops.merge_all()), "1|", "#"),
    ],
    "window_with_count": [
        (IN.pipe(ops.window_with_count(2), ops.flat_map(listed)), "123|", "[1, 2] [3] |"),
        (IN.pipe(ops.window_with_count(3, 2), ops.flat_map(listed)), "1234|", "[1, 2, 3] [3, 4] [] |"),
        (IN.pipe(ops.window_with_count(2), ops.take(1), ops.flat_map(listed)), "123|", "[1, 2] |"),
        (IN.pipe(ops.window_with_count(2), ops.merge_all()), "1#", "1 #"),
    ],
    "window_with_time": [
        (IN.pipe(ops.window_with_time(2.5), ops.flat_map(listed)), "-12-3|", "[1, 2] [3] [] |"),
        (
            IN.pipe(ops.window_with_time(2.5, 1.5), ops.take(2), ops.flat_map(listed)),
            "-12345|",
            "[] [1, 2] |",
        ),
        (
            IN.pipe(ops.window_with_time(2, 3, offset=1), ops.flat_map(listed)),
            "01234567|",
            "[1, 2] [4, 5] [7] |",
        ),
    ],
    "window_with_time_or_count": [
        (
            IN.pipe(ops.window_with_time_or_count(2.5, 2), ops.flat_map(listed)),
            "-123--4|",
            "[1, 2] [] [3] [4] |",
        ),
        (
            IN.pipe(ops.window_with_time_or_count(2.5, 2, aligned=False), ops.flat_map(listed)),
            "-123--4|",
            "[1, 2] [3] [4] [] |",
        ),
    ],
    "with_latest_from": [(IN.pipe(ops.with_latest_from(cold("-a--b|"))), "1-2--3|", "(2, 'a') (3, 'b') |")],
    "zip": [
        (IN.pipe(ops.zip(cold("--ab|"))), "123|", "(1, 'a') (2, 'b') |"),
        (creation.zip(IN, IN), "12|", "(1, 1) (2, 2) |"),
        (creation.zip(IN), "12|", "(1,) (2,) |"),
    ],
}
