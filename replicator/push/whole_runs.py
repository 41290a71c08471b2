"""Joins items of a session: runs that are over, and small enough to be sent whole.

Pure. A publisher that was started many times while it reached no node leaves many such runs. A run that is
sent alone costs a message that announces it, an answer to wait for, a chunk and a seal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    WHOLE_RUNS_MAX,
    Chunk,
    Item,
    LogOffset,
    Run,
    SegmentSealed,
    WholeRun,
    WholeRuns,
)
from rt.log.format.constants import Buffer


def joined(items: Sequence[Item]) -> Iterator[Item | WholeRuns]:
    """The items in their order. Consecutive whole runs are joined in as few messages as possible."""
    runs: list[WholeRun] = []
    size = at = 0
    while at < len(items):
        run, behind = _whole_run(items, at)
        if runs and (run is None or len(runs) == WHOLE_RUNS_MAX or size + len(run.data) > CHUNK_BYTES_MAX):
            yield WholeRuns(tuple(runs))
            runs, size = [], 0
        if run is None:
            yield items[at]
        else:
            runs.append(run)
            size += len(run.data)
        at = behind
    if runs:
        yield WholeRuns(tuple(runs))


def _whole_run(items: Sequence[Item], at: int) -> tuple[WholeRun | None, int]:
    """The run that starts with the item at `at`, and the index after it. None, and the next index, if that
    run is not whole.
    """
    run = items[at]
    if not isinstance(run, Run):
        return None, at + 1
    pieces: list[Buffer] = []
    end = LogOffset(run.number, 0, 0)
    for behind, item in enumerate(items[at + 1 :], at + 2):
        if isinstance(item, Chunk) and item.start == end and item.end.offset <= CHUNK_BYTES_MAX:
            pieces.append(item.data)
            end = item.end
        elif isinstance(item, SegmentSealed) and item.end_offset == end and item.is_last_of_run and pieces:
            return WholeRun(run, b"".join(pieces), item.end, item.sealed_ns), behind
        else:
            break
    return None, at + 1
