"""The identity of a disk as bytes: which member of which stream writes here, and what its disk may say.

The file `identity` is replaced whole, so that a crash leaves the old or the new one; it fills one sector.

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
        72      8  number of this life: how often a node was started here
        80      2  bytes of the member's name
        82      2  bytes of the stream's name
        84     12  0
        96    128  name of the member (ASCII), then zeros
       224    128  name of the stream (ASCII), then zeros
       352    160  0
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from rt.errors import Damaged, UnknownVersion
from rt.log.checksum import around, sealed
from rt.log.layout import NEWER_HINT, VERSION
from rt.names import check_name
from sequencer.raft.messages import ID_BYTES, NO_ID, NOWHERE, Claim, Place

IDENTITY_BYTES: Final = 512
IDENTITY_MAGIC: Final = b"RTDISKID"
WIPE_HINT: Final = "Wipe the directory and let the node rejoin."

_IDENTITY = struct.Struct("<8sHHI16s16sQQQQHH12x128s128s160x")
_NUMBER_END: Final = 2**64


@dataclass(frozen=True, slots=True)
class DiskIdentity:
    """Who this disk is. Its id is made with it and never changes; a wiped disk gets another one."""

    stream: str
    name: str
    """The member whose node writes here."""
    disk: bytes
    cluster: bytes
    """`NO_ID` while the disk is blank: no cluster has been made here or has taken it in."""
    epoch: int
    joined: Place
    """The join that admitted this disk, once it has applied it; a blank disk has none."""
    life: int
    """How often a node was started here, this time included."""

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")
        check_name(self.name, kind="member")
        if len(self.disk) != ID_BYTES or len(self.cluster) != ID_BYTES or self.disk == NO_ID:
            raise ValueError(f"disk id {self.disk.hex()}, cluster id {self.cluster.hex()}")
        if not all(0 <= number < _NUMBER_END for number in (self.epoch, *self.joined, self.life)):
            raise ValueError(f"out of range: epoch {self.epoch}, {self.joined}, life {self.life}")
        if self.is_blank and self.joined != NOWHERE:
            raise ValueError(f"a blank disk that has joined at {self.joined}")

    @property
    def is_blank(self) -> bool:
        """Whether the disk belongs to no cluster yet."""
        return self.cluster == NO_ID

    @property
    def claim(self) -> Claim:
        """What this disk says of itself in every message that counts."""
        return Claim(self.disk, self.joined)


def encode_identity(identity: DiskIdentity) -> bytes:
    """The 512 bytes of the file."""
    name, stream = identity.name.encode(), identity.stream.encode()
    numbers = (identity.epoch, *identity.joined, identity.life)
    fields = (VERSION, 0, 0, identity.disk, identity.cluster, *numbers, len(name), len(stream), name, stream)
    return sealed(_IDENTITY.pack(IDENTITY_MAGIC, *fields))


def decode_identity(data: bytes, *, path: str) -> DiskIdentity:
    """Read the whole file `path`.

    `rt.UnknownVersion` if it is of a version or has flags that a newer rt wrote, `rt.Damaged` for anything
    else that `encode_identity` does not write.
    """
    if len(data) < IDENTITY_BYTES:
        raise _damaged("identity is cut short", path, len(data), IDENTITY_BYTES)
    head = data[:IDENTITY_BYTES]
    magic, version, flags, checksum, *fields = _IDENTITY.unpack(head)
    if magic != IDENTITY_MAGIC:
        raise _damaged("not an identity", path, magic, IDENTITY_MAGIC)
    if checksum != around(head):
        raise _damaged("identity fails its checksum", path, checksum, around(head))
    if version != VERSION:
        raise UnknownVersion(
            "identity of an unknown version", where=path, got=version, wanted=VERSION, hint=NEWER_HINT
        )
    if flags:
        raise UnknownVersion("identity with unknown flags", where=path, got=flags, wanted=0, hint=NEWER_HINT)
    if len(data) != IDENTITY_BYTES:
        raise _damaged("identity of another size", path, len(data), IDENTITY_BYTES)
    disk, cluster, epoch, index, term, life, name_bytes, stream_bytes, name, stream = fields
    try:
        names = stream[:stream_bytes].decode("ascii"), name[:name_bytes].decode("ascii")
        identity = DiskIdentity(*names, disk, cluster, epoch, Place(index, term), life)
    except ValueError as error:  # InvalidName and UnicodeDecodeError are some.
        raise Damaged(
            f"identity says what it cannot: {error}", path=path, offset=0, hint=WIPE_HINT
        ) from error
    if encode_identity(identity) != head:
        raise _damaged("identity with something where nothing belongs", path, None, None)
    return identity


def _damaged(what: str, path: str, got: object, wanted: object) -> Damaged:
    return Damaged(what, path=path, offset=0, got=got, wanted=wanted, hint=WIPE_HINT)
