"""The operators of queries, with their Rx names. Each docstring says what the operator emits and saves.

`docs/operators.md` lists them. `rt.query.operators.creation` has observables to start with.
"""

from __future__ import annotations

from rt.query.operators.buffers import buffer_with_count, buffer_with_time, buffer_with_time_or_count
from rt.query.operators.combining.combine import amb, combine_latest, merge, with_latest_from, zip
from rt.query.operators.combining.concat import (
    Failure,
    catch,
    concat,
    delay_subscription,
    on_error_resume_next,
    repeat,
    retry,
)
from rt.query.operators.combining.joins import group_join, join
from rt.query.operators.combining.timeout import timeout
from rt.query.operators.elements.aggregate import average, count, max, min, reduce, scan, sum, to_list
from rt.query.operators.elements.collect import max_by, min_by, to_dict, to_set
from rt.query.operators.elements.conditional import all, contains, is_empty, sequence_equal, some
from rt.query.operators.elements.filter import (
    distinct,
    distinct_until_changed,
    element_at,
    element_at_or_default,
    filter_indexed,
    first,
    first_or_default,
    last,
    last_or_default,
    partition,
    single,
    single_or_default,
    where,
)
from rt.query.operators.elements.map_async import map_async
from rt.query.operators.elements.notifications import dematerialize, materialize, time_interval, timestamp
from rt.query.operators.elements.side_effects import do_action, finally_action
from rt.query.operators.elements.tail import skip_last, take_last
from rt.query.operators.elements.take_skip import (
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
from rt.query.operators.elements.transform import (
    append,
    default_if_empty,
    ignore_elements,
    map,
    map_indexed,
    pairwise,
    starmap,
    start_with,
)
from rt.query.operators.event_time.event_joins import interval_join, temporal_join
from rt.query.operators.event_time.event_windows import (
    Fold,
    WindowResult,
    session_window,
    sliding_window,
    tumbling_window,
)
from rt.query.operators.event_time.time_order import in_time_order
from rt.query.operators.inner.flatten import (
    concat_map,
    flat_map,
    flat_map_indexed,
    merge_all,
    switch_latest,
    switch_map,
    switch_map_indexed,
)
from rt.query.operators.inner.groups import group_by_until
from rt.query.operators.inner.share import share
from rt.query.operators.inner.toggles import buffer_toggle, buffer_when, window_toggle, window_when
from rt.query.operators.keyed import count_by, group_by, reduce_by, scan_by
from rt.query.operators.timed import debounce, delay, sample, throttle_first, throttle_with_mapper
from rt.query.operators.user_functions import compose
from rt.query.operators.windows import (
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
__all__ += ["Fold", "WindowResult", "session_window", "sliding_window", "tumbling_window"]
__all__ += ["in_time_order", "interval_join", "temporal_join"]
__all__ += ["compose"]
__all__ += ["amb", "group_join", "join", "on_error_resume_next", "timeout"]
__all__ += ["map_async"]
__all__ += ["dematerialize", "materialize", "time_interval", "timestamp"]
__all__ += ["max_by", "min_by", "pairwise", "partition", "skip_last", "starmap"]
__all__ += ["take_last", "to_dict", "to_set"]
__all__ += ["buffer_toggle", "buffer_when", "group_by_until", "share", "window_toggle", "window_when"]
__all__ += ["count_by", "group_by", "reduce_by", "scan_by"]
__all__ += ["window_with_count", "window_with_time", "window_with_time_or_count"]
__all__ += ["aggregate", "any", "do", "filter", "flat_map_latest", "prepend", "select", "select_many"]
__all__ += ["switch", "throttle", "throttle_with_timeout"]
