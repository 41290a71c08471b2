"""The operators of queries, by the names that users of Rx know. Each says what it emits and what it saves.

`docs/operators.md` lists them; observables to begin with are in `rt.query.creation`.
"""

from __future__ import annotations

from rt.query.operators.asking import compose
from rt.query.operators.buffers import buffer_with_count, buffer_with_time, buffer_with_time_or_count
from rt.query.operators.chaining import Failure, catch, concat, delay_subscription, repeat, retry
from rt.query.operators.collecting import to_list
from rt.query.operators.combining import combine_latest, merge, with_latest_from, zip
from rt.query.operators.filtering import distinct, distinct_until_changed, filter_indexed, take, where
from rt.query.operators.flattening import (
    concat_map,
    flat_map,
    flat_map_indexed,
    merge_all,
    switch_latest,
    switch_map,
    switch_map_indexed,
)
from rt.query.operators.folding import average, count, max, min, reduce, scan, sum
from rt.query.operators.grouping import group_by
from rt.query.operators.judging import all, contains, is_empty, sequence_equal, some
from rt.query.operators.mapping import (
    append,
    default_if_empty,
    ignore_elements,
    map,
    map_indexed,
    start_with,
)
from rt.query.operators.picking import (
    element_at,
    element_at_or_default,
    first,
    first_or_default,
    last,
    last_or_default,
    single,
    single_or_default,
)
from rt.query.operators.skipping import (
    skip,
    skip_until,
    skip_until_with_time,
    skip_while,
    skip_while_indexed,
    skip_with_time,
)
from rt.query.operators.taking import (
    take_until,
    take_until_with_time,
    take_while,
    take_while_indexed,
    take_with_time,
)
from rt.query.operators.timing import debounce, delay, sample, throttle_first, throttle_with_mapper
from rt.query.operators.watching import do_action, finally_action
from rt.query.operators.windows import window_with_count, window_with_time, window_with_time_or_count

# What others call them.
aggregate = reduce
any = some
do = do_action
filter = where
flat_map_latest = switch_map
prepend = start_with
select = map
select_many = flat_map
switch = switch_latest
throttle = throttle_with_mapper
throttle_with_timeout = debounce

__all__ = [
    "Failure",
    "aggregate",
    "all",
    "any",
    "append",
    "average",
    "buffer_with_count",
    "buffer_with_time",
    "buffer_with_time_or_count",
    "catch",
    "combine_latest",
    "compose",
    "concat",
    "concat_map",
    "contains",
    "count",
    "debounce",
    "default_if_empty",
    "delay",
    "delay_subscription",
    "distinct",
    "distinct_until_changed",
    "do",
    "do_action",
    "element_at",
    "element_at_or_default",
    "filter",
    "filter_indexed",
    "finally_action",
    "first",
    "first_or_default",
    "flat_map",
    "flat_map_indexed",
    "flat_map_latest",
    "group_by",
    "ignore_elements",
    "is_empty",
    "last",
    "last_or_default",
    "map",
    "map_indexed",
    "max",
    "merge",
    "merge_all",
    "min",
    "prepend",
    "reduce",
    "repeat",
    "retry",
    "sample",
    "scan",
    "select",
    "select_many",
    "sequence_equal",
    "single",
    "single_or_default",
    "skip",
    "skip_until",
    "skip_until_with_time",
    "skip_while",
    "skip_while_indexed",
    "skip_with_time",
    "some",
    "start_with",
    "sum",
    "switch",
    "switch_latest",
    "switch_map",
    "switch_map_indexed",
    "take",
    "take_until",
    "take_until_with_time",
    "take_while",
    "take_while_indexed",
    "take_with_time",
    "throttle",
    "throttle_first",
    "throttle_with_mapper",
    "throttle_with_timeout",
    "to_list",
    "where",
    "window_with_count",
    "window_with_time",
    "window_with_time_or_count",
    "with_latest_from",
    "zip",
]
