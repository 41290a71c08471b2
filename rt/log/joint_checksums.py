"""The checksums of many small batches, verified by computing one.

    for each stretch:  its offset, 8 bytes | the stretch | a bridge, 4 bytes, and 4 zeros

The checksum of a stretch starts from that of its offset, which starts from the segment's seed. A bridge is
chosen so that it leads from the checksum that the stretch should have back to the seed: if all stretches are
good, so is what they are joined to, and its checksum is the seed.

Law: one stretch that fails its checksum is always found out, for every step is one-to-one. Several that fail
go unnoticed together no more often than any checksum of 32 bits lets damage pass.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rt.log.batch import Int64s
from rt.log.checksum import batch_seed, crc32c

_POLYNOMIAL: Final = 0x82F63B78
"""That of CRC-32C, its bits reversed."""
_ONES: Final = 0xFFFFFFFF


class Stretches(NamedTuple):
    """Bytes with checksums of their own, in an array of words: from `starts` up to `ends`, counted in words.

    Each checksum starts from the `batch_seed` of the offset. None begins with the very first word.
    """

    starts: Int64s
    ends: Int64s
    checksums: npt.NDArray[np.uint32]
    offsets: Int64s

    def hold(self, words: npt.NDArray[np.uint64], seed: int) -> bool:
        """Whether all checksums are right; `seed` is the segment's."""
        sizes = self.ends - self.starts + 2
        behind = np.cumsum(sizes)
        firsts = behind - sizes
        places = np.arange(sizes.sum()) + np.repeat(self.starts - 1 - firsts, sizes)
        joined = words.take(places, mode="clip")  # What is taken on both sides of a stretch is replaced.
        joined[firsts] = self.offsets.view(np.uint64)
        joined[behind - 1] = ~self.checksums ^ np.uint32(_before_zeros(~seed & _ONES))
        return bool(crc32c(joined.data.cast("B"), seed) == seed)

    def held(self, data: memoryview, seed: int) -> npt.NDArray[np.bool_]:
        """Which of the checksums are right."""
        columns = (self.starts * 8, self.ends * 8, self.checksums, self.offsets)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found = [crc32c(data[start:end], batch_seed(seed, at)) == wanted for start, end, wanted, at in rows]
        return np.array(found, np.bool_)


@lru_cache(maxsize=64)
def _before_zeros(register: int) -> int:
    """What the register of the checksum held before 8 zero bytes led it to `register`."""
    for _ in range(64):
        odd = register >> 31
        register = ((register ^ _POLYNOMIAL * odd) << 1 | odd) & _ONES
    return register
