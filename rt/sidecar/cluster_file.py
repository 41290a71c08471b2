"""The cluster that a session is pushed to: the file `.cluster` in its directory.

    offset  bytes  field
         0      8  magic "RTCLUSTR"
         8      2  version
        10      2  0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-31
        16     16  cluster id
        32      8  the latest epoch of a node that accepted the session (`rt.cluster_epoch`)
        40      4  checksum: CRC-32C of bytes 0-39

A file of an earlier rt ends at byte 32. If the last two fields are missing or corrupt, no epoch is known.

Invariant: while the file exists, the session is sent to no other cluster, and to no node in an earlier epoch.
"""

from __future__ import annotations

import os
import struct
from typing import Final, NamedTuple

from rt.errors import UnknownVersion
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.checksum import around, crc32c, sealed
from rt.log.format.constants import NEWER_HINT, VERSION
from rt.log.scan.directory import read_file
from rt.log.whole_files import write_whole

CLUSTER_FILE: Final = ".cluster"

_RECORD = struct.Struct("<8sHHI16s")
_EPOCH = struct.Struct("<QI")
_MAGIC = b"RTCLUSTR"


class PushedCluster(NamedTuple):
    """`id` is empty, and `epoch` 0, if no cluster is known."""

    id: bytes = b""
    epoch: int = 0


def read_cluster(path: str, *, disk: Disk = REAL) -> PushedCluster:
    """Read the cluster of session directory `path`. `rt.UnknownVersion` if a newer rt wrote it.

    If the file cannot be read, no cluster is known. Then the nodes decide.
    """
    name = os.path.join(path, CLUSTER_FILE)
    data = read_file(disk, name, _RECORD.size + _EPOCH.size, doing="reading the cluster of a session")
    if data is None or len(data) < _RECORD.size:
        return PushedCluster()
    magic, version, _, checksum, cluster = _RECORD.unpack_from(data)
    if (magic, checksum) != (_MAGIC, around(data[: _RECORD.size])):
        return PushedCluster()
    if version != VERSION:
        what = "unknown version of the cluster of a session"
        raise UnknownVersion(what, where=name, got=version, expected=VERSION, hint=NEWER_HINT)
    return PushedCluster(bytes(cluster), _epoch_in(data))


def write_cluster(path: str, cluster: PushedCluster, *, disk: Disk = REAL) -> None:
    """Durable on return. `rt.StorageError` if it cannot be written."""
    with storage_errors(path, "remembering the cluster"):
        content = sealed(_RECORD.pack(_MAGIC, VERSION, 0, 0, cluster.id)) + struct.pack("<Q", cluster.epoch)
        content += struct.pack("<I", crc32c(content))
        write_whole(disk, os.path.join(path, CLUSTER_FILE), content)


def _epoch_in(data: bytes) -> int:
    if len(data) < _RECORD.size + _EPOCH.size:
        return 0
    epoch, checksum = _EPOCH.unpack_from(data, _RECORD.size)
    return epoch if checksum == crc32c(data[: _RECORD.size + 8]) else 0
