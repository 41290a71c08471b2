"""The file `identity` in a node's directory. It identifies the disk.

Invariant: a directory that contains files of a node never gets a second identity. If a node votes or counts
entries as synced with the files of an unknown disk, it could break a promise of an earlier run. The caller
holds the directory's lock.

The file is replaced as a whole, so that a crash leaves the old or the new one. It fills one sector.

    offset  bytes  field
         0      8  magic "RTDISKID"
         8      2  version
        10      2  flags: 0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-511
        16     16  disk id
        32     16  cluster id, zeros while the disk is blank
        48      8  epoch of the cluster
        56      8  index of the join that admitted the disk, 0 if it has not applied it
        64      8  term of that join
        72      8  run number: how often a node was started here
        80      2  bytes of the member's name
        82      2  bytes of the stream's name
        84     12  0
        96    128  name of the member (ASCII), then zeros
       224    128  name of the stream (ASCII), then zeros
       352    160  0
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from rt.errors import ClusterMismatch
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.checksum import sealed
from rt.log.format.constants import VERSION
from rt.log.whole_files import write_whole
from rt.names import check_name
from sequencer.raft.model.messages import ID_BYTES, NO_ID, NOWHERE, DiskClaim, LogIndex
from sequencer.raft.storage.sealed_head import check_head, damaged

__all__ = ["IDENTITY_FILE", "DiskIdentity", "open_identity", "store_identity"]

IDENTITY_FILE: Final = "identity"

_NODE_FILES: Final = ("log.", "snapshot.")


def _random_id() -> bytes:
    return os.urandom(ID_BYTES)


def open_identity(
    directory: str, *, stream: str, name: str, disk: Disk = REAL, new_id: Callable[[], bytes] = _random_id
) -> DiskIdentity:
    """Start a run of the member `name` of `stream` in `directory`. Create the directory and the identity if
    they are missing.

    The new run number is durable on return. Each pair of disk id and run number is returned once.

    Raises `rt.Corrupt` if the identity cannot be read, or if it is missing although the directory contains
    files of a node. Raises `rt.UnknownVersion`. Raises `rt.ClusterMismatch` if the directory belongs to
    another member or stream. In these cases no file is changed. Raises `rt.StorageError` like
    `store_identity`.
    """
    path = os.path.join(directory, IDENTITY_FILE)
    with storage_errors(directory, "opening a node's directory"):
        disk.make_directory(directory)
        names = disk.list_directory(directory)
    if IDENTITY_FILE in names:
        identity = _read(disk, path)
        _check_owner(identity, stream, name, path)
    else:
        _check_unused(names, path)
        identity = DiskIdentity(stream, name, new_id(), NO_ID, 0, NOWHERE, 0)
    identity = replace(identity, run=identity.run + 1)
    store_identity(directory, identity, disk=disk)
    return identity


def store_identity(directory: str, identity: DiskIdentity, *, disk: Disk = REAL) -> None:
    """Replace the identity. It is durable on return. A crash leaves the old or the new identity.

    Raises `rt.DiskFull`, with the old identity in place, or `rt.StorageFailed`, with either of them in place.
    """
    path = os.path.join(directory, IDENTITY_FILE)
    with storage_errors(path, "writing the identity"):
        write_whole(disk, path, encode_identity(identity))


def _read(disk: Disk, path: str) -> DiskIdentity:
    with storage_errors(path, "reading the identity"), closing(disk.open(path)) as file:
        data = file.pread(IDENTITY_BYTES + 1, 0)  # Read one byte more, to detect a file that is too long.
    return decode_identity(data, path=path)


def _check_owner(identity: DiskIdentity, stream: str, name: str, path: str) -> None:
    if (identity.stream, identity.name) != (stream, name):
        raise ClusterMismatch(
            "the directory belongs to another node",
            where=path,
            got=f"member {identity.name} of stream {identity.stream}",
            expected=f"member {name} of stream {stream}",
            hint="Use a separate directory for each node.",
        )


def _check_unused(names: Iterable[str], path: str) -> None:
    """The identity is written first. If other files exist without it, it was lost."""
    others = sorted(name for name in names if name.startswith(_NODE_FILES))
    if others:
        got = ", ".join(others[:4])
        raise damaged("the identity file is missing in the directory of a node", path, got)


IDENTITY_BYTES: Final = 512
IDENTITY_MAGIC: Final = b"RTDISKID"

_IDENTITY = struct.Struct("<8sHHI16s16sQQQQHH12x128s128s160x")
_NUMBER_END: Final = 2**64


class DiskIdentity(Struct, frozen=True):
    """The identity of a disk. Its id never changes; a wiped disk gets another one."""

    stream: str
    name: str
    """The member whose node runs here."""
    disk: bytes
    cluster: bytes
    """`NO_ID` while the disk is blank: it belongs to no cluster yet."""
    epoch: int
    joined: LogIndex
    """The join that admitted this disk, once it has applied it."""
    run: int
    """How often a node was started here, including this time."""

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")
        check_name(self.name, kind="member")
        if len(self.disk) != ID_BYTES or len(self.cluster) != ID_BYTES or self.disk == NO_ID:
            raise ValueError(f"disk id {self.disk.hex()}, cluster id {self.cluster.hex()}")
        if not all(0 <= number < _NUMBER_END for number in (self.epoch, *self.joined, self.run)):
            raise ValueError(f"out of range: epoch {self.epoch}, {self.joined}, run {self.run}")
        if self.is_blank and self.joined != NOWHERE:
            raise ValueError(f"a blank disk that has joined at {self.joined}")

    @property
    def is_blank(self) -> bool:
        return self.cluster == NO_ID

    @property
    def claim(self) -> DiskClaim:
        """The disk's claim in messages."""
        return DiskClaim(self.disk, self.joined)


def encode_identity(identity: DiskIdentity) -> bytes:
    name, stream = identity.name.encode(), identity.stream.encode()
    numbers = (identity.epoch, *identity.joined, identity.run)
    fields = (VERSION, 0, 0, identity.disk, identity.cluster, *numbers, len(name), len(stream), name, stream)
    return sealed(_IDENTITY.pack(IDENTITY_MAGIC, *fields))


def decode_identity(data: bytes, *, path: str) -> DiskIdentity:
    """Raises `rt.UnknownVersion` for a version or flags of a newer rt, else `rt.Corrupt`."""
    head = data[:IDENTITY_BYTES]
    check_head(head, IDENTITY_BYTES, IDENTITY_MAGIC, path=path, what="an identity file")
    if len(data) != IDENTITY_BYTES:
        raise damaged("wrong size of an identity file", path, len(data), IDENTITY_BYTES)
    _, _, _, _, disk, cluster, epoch, index, term, run, *rest = _IDENTITY.unpack(head)
    name_bytes, stream_bytes, name, stream = rest
    try:
        names = stream[:stream_bytes].decode("ascii"), name[:name_bytes].decode("ascii")
        identity = DiskIdentity(*names, disk, cluster, epoch, LogIndex(index, term), run)
    except ValueError as error:  # This includes InvalidName and UnicodeDecodeError.
        raise damaged(f"invalid value in an identity file: {error}", path) from error
    if encode_identity(identity) != head:
        raise damaged("nonzero reserved bytes in an identity file", path)
    return identity
