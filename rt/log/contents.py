"""Whether batches whose checksums hold say what they must: offsets, topics, times, and that they decompress.

Law: a batch passes if a reader can hand out every message of it. Batches are looked at many at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rt.log.batch import BadBatch
from rt.log.columns import Placed, decode, groups

Bytes = npt.NDArray[np.uint8]


def content_problems(
    data: bytes, batches: Sequence[Placed], sessions: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Yield the offset of each bad batch in the segment, and what is wrong with it. `data` holds them all."""
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


def _problem(buffer: Bytes, group: Sequence[Placed], names: dict[int, str]) -> str | None:
    try:
        decode(buffer, group, names)
    except BadBatch as problem:
        return str(problem)
    return None
