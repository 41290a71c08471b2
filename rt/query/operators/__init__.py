"""The operators of queries, with their Rx names. Each docstring says what the operator emits and saves.

`docs/operators.md` lists them. `rt.query.operators.creation` has observables to start with.
"""

from __future__ import annotations

from rt.query.operators.aggregate import average, count, max, min, reduce, scan, sum, to_list
from rt.query.operators.buffers import buffer_with_count, buffer_with_time, buffer_with_time_or_count
from rt.query.operators.combine import combine_latest, merge, with_latest_from, zip
from rt.query.operators.concat import Failure, catch, concat, delay_subscription, repeat, retry
from rt.query.operators.conditional import all, contains, is_empty, sequence_equal, some
from rt.query.operators.filter import (
    distinct,
    distinct_until_changed,
    element_at,
    element_at_or_default,
    filter_indexed,
    first,
    first_or_default,
    last,
    last_or_default,
    single,
    single_or_default,
    where,
)
from rt.query.operators.flatten import (
    concat_map,
    flat_map,
    flat_map_indexed,
    merge_all,
    switch_latest,
    switch_map,
    switch_map_indexed,
)
from rt.query.operators.side_effects import do_action, finally_action
from rt.query.operators.take_skip import (
    skip,
    skip_until,
    skip_until_with_time,
    skip_while,
    skip_while_indexed,
    skip_with_time,
    take,
    take_until,
    take_until_with_time,
    take_while,
    take_while_indexed,
    take_with_time,
)
from rt.query.operators.timed import debounce, delay, sample, throttle_first, throttle_with_mapper
from rt.query.operators.transform import (
    append,
    default_if_empty,
    ignore_elements,
    map,
    map_indexed,
    start_with,
)
from rt.query.operators.user_functions import compose
from rt.query.operators.windows import (
    group_by,
    window_with_count,
    window_with_time,
    window_with_time_or_count,
)

# Other Rx names.
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

__all__ = ["average", "count", "max", "min", "reduce", "scan", "sum", "to_list"]
__all__ += ["buffer_with_count", "buffer_with_time", "buffer_with_time_or_count"]
__all__ += ["combine_latest", "merge", "with_latest_from", "zip"]
__all__ += ["Failure", "catch", "concat", "delay_subscription", "repeat", "retry"]
__all__ += ["all", "contains", "is_empty", "sequence_equal", "some"]
__all__ += ["distinct", "distinct_until_changed", "element_at", "element_at_or_default", "filter_indexed"]
__all__ += ["first", "first_or_default", "last", "last_or_default", "single", "single_or_default", "where"]
__all__ += ["concat_map", "flat_map", "flat_map_indexed", "merge_all", "switch_latest", "switch_map"]
__all__ += ["switch_map_indexed"]
__all__ += ["do_action", "finally_action"]
__all__ += ["skip", "skip_until", "skip_until_with_time", "skip_while", "skip_while_indexed"]
__all__ += ["skip_with_time", "take", "take_until", "take_until_with_time", "take_while"]
__all__ += ["take_while_indexed", "take_with_time"]
__all__ += ["debounce", "delay", "sample", "throttle_first", "throttle_with_mapper"]
__all__ += ["append", "default_if_empty", "ignore_elements", "map", "map_indexed", "start_with"]
__all__ += ["compose"]
__all__ += ["group_by", "window_with_count", "window_with_time", "window_with_time_or_count"]
__all__ += ["aggregate", "any", "do", "filter", "flat_map_latest", "prepend", "select", "select_many"]
__all__ += ["switch", "throttle", "throttle_with_timeout"]
