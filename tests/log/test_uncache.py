"""Page cache release: whole steps, once, never beyond the requested offset, and without losing bytes."""

import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rt.log.disk import REAL
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId
from rt.log.write.active_segment import UNCACHE_STEP_BYTES, ActiveSegment

HEADER = SegmentHeader(LogKind.SESSION, SegmentId(0, 0), 0, 1, bytes(16))


class Recording:
    """A file that only records the released ranges."""

    def __init__(self) -> None:
        self.given_up: list[tuple[int, int]] = []

    def uncache(self, offset: int, size: int) -> None:
        self.given_up.append((offset, size))


@given(st.lists(st.integers(-(2**25), 2**27), min_size=1))
def test_uncache_releases_whole_steps_before_offset_and_no_bytes_after_it(places: list[int]) -> None:
    file = Recording()
    active = ActiveSegment(HEADER, file, 2**27, 0)  # type: ignore[arg-type]
    furthest = 0
    for place in places:
        size = active.uncacheable_bytes(place)
        known = len(file.given_up)
        active.uncache(place)
        furthest = max(furthest, place)
        assert active.cached_from == furthest // UNCACHE_STEP_BYTES * UNCACHE_STEP_BYTES
        assert (len(file.given_up) > known) == (size > 0)
        assert all(start >= 0 and start + length <= furthest for start, length in file.given_up)
    reached = 0
    for start, length in file.given_up:
        assert start <= reached < start + length
        reached = start + length
    assert reached == active.cached_from


def file_system(path: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((point, kind) for point, kind in mounts if path.is_relative_to(point))[1]


def test_uncache_of_real_file_keeps_its_bytes_and_frees_synced_pages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = os.urandom(1 << 20) * 12
    file = REAL.create(str(path))
    file.pwritev([content], 0)
    file.sync()
    file.uncache(0, 8 * 2**20)
    assert path.read_bytes()[8 * 2**20 :] == content[8 * 2**20 :]
    if file_system(tmp_path) in {"ext4", "xfs", "btrfs"}:
        deadline = time.monotonic() + 120
        while file.is_cached(2**20, 1):  # The kernel keeps pages that it is using at that moment.
            assert time.monotonic() < deadline
            file.uncache(0, 8 * 2**20)
        assert file.is_cached(len(content) - 2**20, 2**20)
    assert file.pread(len(content), 0) == content
    file.close()
    assert not file.is_cached(0, 1)
    file.uncache(0, 1)  # A hint to a closed file has no effect.
