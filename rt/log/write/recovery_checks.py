"""Check whether a crash can have left a log directory in its state. Pure.

Invariants:
- Only bytes after the durable end may be missing or fail to verify.
- Numbers or positions continue from one segment to the next.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from rt.errors import Corrupt
from rt.log.format.durable_end import DurableEnd
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity


class TornTail(Struct, frozen=True):
    """The torn tail of a segment: cut the segment at `end`, which removes `torn_bytes`."""

    end: int
    torn_bytes: int


def judge_tail(
    *, path: str, verified_end: int, size_bytes: int, durable_end: int, problem: str | None
) -> TornTail:
    """Decide what to do with a segment whose frames verify up to `verified_end`.

    `size_bytes` is the file's size, `durable_end` what its writer last recorded as synced (0: nothing),
    `problem` the scanner's reason to stop. Raises `rt.Corrupt` if synced bytes fail or are missing.
    """
    assert verified_end <= size_bytes, (verified_end, size_bytes)
    if verified_end < durable_end:
        raise Corrupt(
            problem or "synced bytes are missing",
            path=path,
            offset=verified_end,
            got=f"{size_bytes} bytes",
            expected=f"whole frames up to {durable_end}",
            hint="This is no torn tail: restore the file, or start a new session directory.",
        )
    return TornTail(verified_end, size_bytes - verified_end)


def check_numbers(
    path: str, identity: LogIdentity, segments: Sequence[tuple[SegmentId, int, int]], *, is_copy: bool
) -> None:
    """Raise `rt.Corrupt` unless each segment starts where the previous one ends.

    Each of `segments` is an id, the first number or position, and the end. A copy may have a gap where its
    source was trimmed. A copy may also hold more, or fewer, messages of a session's run than the publisher's
    own disk remembered at the start of the next run.
    """
    for (earlier, _, end), (later, first, _) in itertools.pairwise(segments):
        if first == end or identity.dedup_id is not None:
            continue
        is_free = identity.kind is LogKind.SESSION and later.run != earlier.run
        if not is_copy or (first < end and not is_free):
            raise Corrupt(
                "numbers do not continue from one segment to the next",
                path=os.path.join(path, later.file_name),
                offset=0,
                got=first,
                expected=end,
                hint="The files are from different times: restore all of them, or start a new directory.",
            )


def check_nothing_vanished(
    path: str,
    identity: LogIdentity,
    durable: DurableEnd,
    sizes: Mapping[SegmentId, int],
    end: int,
    *,
    is_copy: bool,
) -> None:
    """Raise `rt.Corrupt` if data is missing that was recorded as synced, and was not trimmed.

    `sizes` are the sizes of all segments; the size of a trimmed segment is its size before the trim. `end` is
    the end of the log.
    """
    last = max(sizes, default=SegmentId(-1, -1))
    is_gone = durable.id > last or sizes.get(durable.id, durable.offset) < durable.offset
    is_dense = identity.dedup_id is None and (not is_copy or durable.id == last)
    if is_gone or (durable.end > end and is_dense):
        raise Corrupt(
            "synced segments are missing",
            path=os.path.join(path, durable.id.file_name),
            offset=0,
            got=f"numbers up to {end}",
            expected=f"up to {durable.end}, which were synced",
            hint="Restore the files, or start a new session directory.",
        )
