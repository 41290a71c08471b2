"""After a power cut at any disk change of a receiver or merger, durable data stays and the log resumes.

The tests reopen the log with `resume` and continue it. Its bytes must then equal those of an uninterrupted
log.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from batches import (
    CLUSTER,
    INCARNATION,
    Range,
    Said,
    block_of,
    declaration_block,
    in_place,
    merged_header,
    session_bytes,
    session_header,
)
from crc32c import crc32c
from disks import MemoryDisk
from disks.crash_sweep import Log, Step, sweep

from rt.log.check.verify import verify
from rt.log.format.running_checksum import ChecksummedBoundary
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId, encode_segment_header
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.scan.scanner import MergedScanner, Scanner, ScanResult, SessionScanner
from rt.log.write.writer import BatchFrames, CopyRange, LogWriter

PATH = "/copy"


def clock() -> int:
    return 1_700_000_000_000_000_000


# A copy of a session: three segments of two runs

RUNS = [[Said("t", b"%d" % n + bytes(n * 400), n)] * (n + 1) for n in range(4)]
HEADERS = [
    session_header(run=run, roll=roll, first=first)
    for run, roll, first in ((0, 0, 0), (0, 1, 10), (1, 0, 18))
]
COPY = [encode_segment_header(header) + session_bytes(header, RUNS) for header in HEADERS]
SESSION = LogIdentity(LogKind.SESSION, INCARNATION, "feed")


def batch_at(data: bytes, at: int) -> bytes:
    return data[at : at + int.from_bytes(data[at + 8 : at + 12], "little")]


class Marking(SessionScanner):
    """A scanner that keeps the batch boundaries that it finds, as a receiver's scanner does."""

    def __init__(self, header: SegmentHeader) -> None:
        super().__init__(header, marks=True)
        self.seen: list[ChecksummedBoundary] = []

    def scan(self, data: memoryview, *, values: bool = True) -> ScanResult:
        found = super().scan(data, values=values)
        self.seen += found.marks
        return found


class Receiving:
    """A receiver that takes one step at a time: start, append and sync, seal."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.scanner: Marking | None = None
        self.writer = LogWriter.open(
            PATH, SESSION, resume=True, scanner_for=self._scanner_for, disk=disk, clock=clock
        )

    def _scanner_for(self, header: SegmentHeader) -> Scanner:
        assert self.scanner is None, "one segment is resumed"
        self.scanner = Marking(header)
        return self.scanner

    @property
    def place(self) -> tuple[int, int]:
        """Return the index of the segment and the offset in it."""
        writer = self.writer
        if writer.last_id is None:
            return 0, 0
        index = [header.id for header in HEADERS].index(writer.last_id)
        return index, len(COPY[index]) if writer.active is None else writer.offset

    def steps(self, log: Log) -> Iterator[None]:
        index, at = self.place
        while True:
            if self.writer.active is None:
                index = index + 1 if at else 0
                if index == len(COPY):
                    return
                header, head = HEADERS[index], COPY[index][:64]
                self.writer.start(header.id, first=header.first, run_id=header.run_id, header_bytes=head)
                at = 64
            elif at == len(COPY[index]):
                self.writer.seal()
            else:
                batch = batch_at(COPY[index], at)
                stamp = int.from_bytes(batch[32:40], "little", signed=True)
                end = int.from_bytes(batch[24:32], "little") + int.from_bytes(batch[20:24], "little")
                self.writer.append([BatchFrames([batch], end, stamp, stamp)])
                self.writer.sync()
                at += len(batch)
            log.append((index, at))
            yield

    def close(self) -> None:
        self.writer.close()


def receive(disk: MemoryDisk, log: Log, count: int = 99) -> None:
    receiving = Receiving(disk)
    for _ in zip(range(count), receiving.steps(log), strict=False):
        pass
    receiving.close()


def receive_in_turns(disk: MemoryDisk, log: Log) -> None:
    for count in (2, 4, 3, 99):
        receive(disk, log, count)


def receive_and_trim(disk: MemoryDisk, log: Log) -> None:
    receive(disk, log, 8)
    receiving = Receiving(disk)
    receiving.writer.trim(SegmentId(0, 1), TrimReason.MERGED)
    receiving.close()
    receive(disk, log, 6)


def check_copy(disk: MemoryDisk, log: Log) -> None:
    receiving = Receiving(disk)
    place = receiving.place
    assert place >= max(log, default=(0, 0))
    if receiving.writer.active is not None:
        assert receiving.scanner is not None
        assert (receiving.scanner.offset, receiving.scanner.next) == (place[1], receiving.writer.end)
        assert [mark.offset for mark in receiving.scanner.seen][-1:] == ([place[1]] if place[1] > 64 else [])
    receiving.close()
    receive(disk, [])
    for header, content in zip(HEADERS, COPY, strict=True):
        assert disk.read(f"{PATH}/{header.id}") in ({content} if header.id.roll else {content, b""})
    assert verify(PATH, disk=disk).damage == []


def receive_once_more(disk: MemoryDisk, log: Log) -> None:
    receive(disk, log, 2)


# A merged log whose blocks copy their batches from a file beside it

RANGES = [
    Range(1, tuple(map(tuple, RUNS)), number=0),
    Range(2, tuple(map(tuple, RUNS[:2])), number=5, skip=1),
    Range(3, (tuple(RUNS[3]),), number=10, offset=8192),
]
MERGED = LogIdentity(LogKind.MERGED, CLUSTER, "stream")
MERGED_HEADER = merged_header()


def make_blocks() -> tuple[list[bytes], bytes]:
    blocks, position = [], 0
    for index, part in enumerate(RANGES):
        blocks.append(declaration_block(part.session_id, position=position))
        blocks.append(block_of(part, position=position, instruction=index + 1))
        position += part.count
    whole = in_place(*blocks)
    placed, at = [], 0
    for block in blocks:
        placed.append(whole[at : at + len(block)])
        at += len(block)
    return placed, b"".join(block[96:] for block in blocks)


BLOCKS, SOURCE = make_blocks()
WHOLE = encode_segment_header(MERGED_HEADER) + b"".join(BLOCKS)


def prepare_source(disk: MemoryDisk) -> None:
    disk.write("/source", SOURCE)


def open_merged(disk: MemoryDisk) -> tuple[LogWriter, list[MergedScanner]]:
    found: list[MergedScanner] = []

    def scanner_for(header: SegmentHeader) -> Scanner:
        found.append(MergedScanner(header, chain=7))
        return found[-1]

    return LogWriter.open(PATH, MERGED, resume=True, scanner_for=scanner_for, disk=disk, clock=clock), found


def merge(disk: MemoryDisk, log: Log, count: int = 99) -> None:
    writer, _ = open_merged(disk)
    source = disk.open("/source")
    if writer.active is None:
        header = MERGED_HEADER
        writer.start(header.id, first=0, created_ns=header.created_ns)
    at, source_at, runs = 64, 0, []
    for block in BLOCKS:
        end = int.from_bytes(block[56:64], "little") + int.from_bytes(block[64:72], "little")
        is_declaration = block[10] == 2
        size = len(block) - 96
        copied = block[96:] if is_declaration else CopyRange(source, source_at, size)
        if at >= writer.offset:
            runs.append(BatchFrames([block[:96], copied], end, 0, 3, is_declaration=is_declaration))
        at, source_at = at + len(block), source_at + size
    runs = runs[:count]
    for start in range(0, len(runs), 2):
        writer.append(runs[start : start + 2])
        writer.sync()
        log.append(writer.offset)
    source.close()
    writer.close()


def merge_in_turns(disk: MemoryDisk, log: Log) -> None:
    for count in (1, 2, 99):
        merge(disk, log, count)


def check_merged(disk: MemoryDisk, log: Log) -> None:
    writer, found = open_merged(disk)
    if writer.active is None:
        assert not log
    else:
        assert writer.offset >= max(log, default=0)
        (scanner,) = found
        assert scanner.boundary == writer.offset
        assert scanner.chain == chain_up_to(writer.offset)
    writer.close()
    merge(disk, [])
    assert disk.read(f"{PATH}/log.0.7") == WHOLE
    assert [problem.what for problem in verify(PATH, disk=disk).damage] == []


def chain_up_to(end: int) -> int:
    counts, at = b"", 64
    for block in BLOCKS:
        at += len(block)
        if at <= end:
            counts += block if block[10] == 2 else block[:96]
    return crc32c(counts, 7)


def merge_once_more(disk: MemoryDisk, log: Log) -> None:
    merge(disk, log, 1)


# Sweeps


def test_power_cut_at_any_change_of_copy_loses_no_durable_data_and_copy_resumes() -> None:
    """The receivers that take turns or trim are cut below, together with their recovery."""
    assert sweep(receive, check_copy, seeds=range(1)) > 100


@pytest.mark.parametrize("in_kernel", [False, True])
def test_power_cut_at_any_change_of_merger_loses_no_durable_data_and_merger_resumes(
    in_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_kernel:
        monkeypatch.setattr("rt.log.write.vectored_io.KERNEL_BYTES_MIN", 1)
    assert sweep(merge_in_turns, check_merged, seeds=range(1), prepare=prepare_source) > 60


@pytest.mark.slow
@pytest.mark.parametrize("run", [receive_in_turns, receive_and_trim])
def test_second_power_cut_while_copy_resumes_loses_no_durable_data(run: Step) -> None:
    assert sweep(run, check_copy, seeds=range(2), recover=receive_once_more, recover_cuts=1) > 100


@pytest.mark.slow
def test_second_power_cut_while_merger_resumes_loses_no_durable_data() -> None:
    checked = sweep(
        merge_in_turns,
        check_merged,
        seeds=range(2),
        prepare=prepare_source,
        recover=merge_once_more,
        recover_cuts=1,
    )
    assert checked > 100


def test_sweep_detects_writer_resuming_without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rt.log.write.writer.LogWriter.sync_to", lambda self, point: None)
    with pytest.raises(AssertionError, match="power cut"):
        sweep(receive, check_copy, seeds=range(2))
