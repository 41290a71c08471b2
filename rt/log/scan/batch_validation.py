"""Check the contents of batches with valid checksums: offsets, topics, times, and decompression.

A batch passes if a reader can return every message of it. Many batches are checked at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rt.log.format.batch import BadBatch
from rt.log.scan.batch_decoder import PlacedBatch, decode, groups

Bytes = npt.NDArray[np.uint8]


def content_problems(
    data: bytes, batches: Sequence[PlacedBatch], sessions: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Yield the offset of each bad batch in the segment, and the reason. `data` holds all of them."""
    buffer = np.frombuffer(data, np.uint8)
    names = dict(sessions)
    whole = [batch._replace(skip=0) if batch.skip else batch for batch in batches]
    for group in groups(whole):
        if _problem(buffer, group, names) is None:
            continue
        for batch in group:
            problem = _problem(buffer, [batch], names)
            if problem is not None:
                yield batch.offset, problem


def _problem(buffer: Bytes, group: Sequence[PlacedBatch], names: dict[int, str]) -> str | None:
    try:
        decode(buffer, group, names)
    except BadBatch as problem:
        return str(problem)
    return None
