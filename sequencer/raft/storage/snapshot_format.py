"""Snapshot files: names and header.

A snapshot is `snapshot.I`, where I is the index of the last entry that it covers: a header, then the content
(the node's whole replicated state). It is renamed to this name after its fsync, so a file with this name was
complete: if it is not now, it is corrupt. While it is written it is called `snapshot.I.N.new`.

    offset  bytes  field
         0      8  magic "RTSNAPST"
         8      2  version
        10      2  flags: 0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-95
        16     16  cluster id
        32      8  epoch of the cluster
        40      8  index of the last entry covered
        48      8  term of that entry
        56      8  length of the content, bytes
        64     32  SHA-256 of the content
        96         content
"""

from __future__ import annotations

import re
import struct
from typing import Final

from msgspec import Struct

from rt.log.format.checksum import sealed
from rt.log.format.constants import VERSION, Buffer
from sequencer.raft.model.messages import DIGEST_BYTES, ID_BYTES, LogIndex
from sequencer.raft.storage.sealed_head import check_head, damaged

SNAPSHOT_HEADER_BYTES: Final = 96
SNAPSHOT_MAGIC: Final = b"RTSNAPST"

_HEADER = struct.Struct("<8sHHI16sQQQQ32s")
_NAME = re.compile(r"snapshot\.(0|[1-9][0-9]{0,19})", re.ASCII)
_PENDING_NAME = re.compile(r"snapshot\.[0-9]{1,20}\.[0-9]+\.new", re.ASCII)
_NUMBER_END: Final = 2**64


class SnapshotMeta(Struct, frozen=True):
    """The identity of a snapshot: its cluster, how far it covers the Raft log, and its content."""

    cluster: bytes
    epoch: int
    place: LogIndex
    """The last entry that it covers."""
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.cluster) != ID_BYTES or len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"cluster id of {len(self.cluster)} bytes, digest of {len(self.digest)}")
        if not all(0 <= number < _NUMBER_END for number in (self.epoch, *self.place, self.length)):
            raise ValueError(f"out of range: epoch {self.epoch}, {self.place}, {self.length} bytes")


def snapshot_name(index: int) -> str:
    return f"snapshot.{index}"


def pending_name(index: int, number: int) -> str:
    """The name while it is written. `number` is unique in the process."""
    return f"snapshot.{index}.{number}.new"


def parse_snapshot_name(name: str) -> int | None:
    """The index in a file name. None if it is not exactly the name of a snapshot."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and int(match[1]) < _NUMBER_END else None


def is_pending_name(name: str) -> bool:
    return _PENDING_NAME.fullmatch(name) is not None


def encode_snapshot_header(meta: SnapshotMeta) -> bytes:
    fields = (VERSION, 0, 0, meta.cluster, meta.epoch, *meta.place, meta.length, meta.digest)
    return sealed(_HEADER.pack(SNAPSHOT_MAGIC, *fields))


def decode_snapshot_header(data: Buffer, *, path: str, index: int, size: int) -> SnapshotMeta:
    """Decode the header of the file `path`, which is named for `index` and has `size` bytes.

    Raises `rt.UnknownVersion` for a version or flags of a newer rt, else `rt.Corrupt`, also if the content
    does not have the length in the header.
    """
    head = bytes(data[:SNAPSHOT_HEADER_BYTES])
    check_head(head, SNAPSHOT_HEADER_BYTES, SNAPSHOT_MAGIC, path=path, what="a snapshot header")
    *_, cluster, epoch, at, term, length, digest = _HEADER.unpack(head)
    if at != index:
        raise damaged("the snapshot's index differs from its file name", path, at, index)
    if size != SNAPSHOT_HEADER_BYTES + length:
        raise damaged(
            "the snapshot's size differs from its header", path, size, SNAPSHOT_HEADER_BYTES + length
        )
    return SnapshotMeta(cluster, epoch, LogIndex(at, term), length, digest)
