"""The content of a log entry: commands of one proposer, the join of a disk, a reset, or a no-op. Pure.

All fields are little-endian. Commands (kind 0): up to `PACK_BYTES` that one node proposed together are one
entry, so that they share its cost:

    offset  bytes  field
         0      1  kind 0
         1      1  version
         2      2  0
         4      4  count of commands, at least 1
         8     16  disk of the proposer
        24      8  run of the proposer: its run number on that disk, then 32 random bits
        32      8  sequence: ordinal of this pack in that run, from 1
        40      8  floor: the proposer knows the outcome of every pack below
        48    4 n  length of each command
                   the commands

No-op (kind 1, one byte): the first entry of a leader's term, appended by PySyncObj.
Join (kind 16): from here on only this disk counts for the member:

         0      1  kind 16
         1      1  version
         2      2  length of the name
         4      4  0
         8     16  disk
        24         the member's name

Reset (kind 17): the last command of this epoch; nothing after it is ever applied:

         0      1  kind 17
         1      1  version
         2      6  0
         8      8  the epoch that it ends; no effect in another epoch
        16         the command
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, TypeAlias

from rt.errors import FormatError, UnknownVersion
from rt.log.format.constants import NEWER_HINT
from rt.names import is_name
from sequencer.raft.model.messages import COMMAND_BYTES_MAX, ENTRY_BYTES_MAX

PACK_BYTES: Final = 256 * 1024
"""A pack is closed at this size: larger packs would make the nodes wait for each other."""
PACK_COMMANDS_MAX: Final = 1024
"""Commands in a pack. Each adds 4 bytes, which keeps every entry below `ENTRY_BYTES_MAX`."""
PACKS_MAX: Final = 16
"""Packs of one proposer in flight: enough to keep disks and network busy."""
NO_OP: Final = b"\x01"

_VERSION = 1
_COMMANDS, _NO_OP_KIND, _JOIN, _RESET = 0, 1, 16, 17
_PACK = struct.Struct("<BBHI16sQQQ")
_JOIN_HEADER = struct.Struct("<BBHI16s")
_RESET_HEADER = struct.Struct("<BB6sQ")


class Commands(NamedTuple):
    """Commands that one node proposed together: a pack."""

    disk: bytes
    run: int
    sequence: int
    floor: int
    commands: tuple[bytes, ...]


class NoOp(NamedTuple):
    """The first entry of a term."""


class JoinEntry(NamedTuple):
    """From here on only `disk` counts for the member."""

    name: str
    disk: bytes


class ResetEntry(NamedTuple):
    """`command` is the last one of `epoch`."""

    epoch: int
    command: bytes


Content: TypeAlias = Commands | NoOp | JoinEntry | ResetEntry


def encode_commands(disk: bytes, run: int, sequence: int, floor: int, commands: Sequence[bytes]) -> bytes:
    assert 0 < floor <= sequence < floor + PACKS_MAX, (floor, sequence)
    count = len(commands)
    header = _PACK.pack(_COMMANDS, _VERSION, 0, count, disk, run, sequence, floor)
    return b"".join([header, struct.pack(f"<{count}I", *map(len, commands)), *commands])


def encode_join(join: JoinEntry) -> bytes:
    name = join.name.encode()
    return _JOIN_HEADER.pack(_JOIN, _VERSION, len(name), 0, join.disk) + name


def encode_reset(reset: ResetEntry) -> bytes:
    assert len(reset.command) <= COMMAND_BYTES_MAX, len(reset.command)
    return _RESET_HEADER.pack(_RESET, _VERSION, bytes(6), reset.epoch) + reset.command


def decode_content(content: bytes) -> Content:
    """Raises `rt.UnknownVersion` for a kind or version of a newer rt, and `rt.FormatError` for anything else
    that the encoders do not write.
    """
    kind = content[0] if content else None
    if kind == _COMMANDS:
        return _decode_commands(content)
    if kind == _JOIN:
        return _decode_join(content)
    if kind == _RESET:
        return _decode_reset(content)
    if content == NO_OP:
        return NoOp()
    if kind is None or kind == NO_OP[0]:
        raise _malformed("is malformed", content[:20])
    raise UnknownVersion("unknown kind of a Raft entry", got=kind, hint=NEWER_HINT)


def decode_join(content: bytes) -> JoinEntry | None:
    """The join in an entry, or None."""
    return _decode_join(content) if content[:1] == bytes([_JOIN]) else None


def _decode_commands(content: bytes) -> Commands:
    if len(content) < _PACK.size:
        raise _malformed("is too short", len(content))
    _, version, zero, count, disk, run, sequence, floor = _PACK.unpack_from(content)
    _check_version(version)
    start = _PACK.size + 4 * count
    is_window = 0 < floor <= sequence < floor + PACKS_MAX
    if zero or not 0 < count <= PACK_COMMANDS_MAX or len(content) < start or not is_window:
        raise _malformed("has an invalid header", (zero, count, sequence, floor))
    lengths = struct.unpack_from(f"<{count}I", content, _PACK.size)
    if start + sum(lengths) != len(content) or max(lengths) > COMMAND_BYTES_MAX:
        raise _malformed("has invalid lengths", sum(lengths))
    ends = accumulate(lengths, initial=start)
    commands = tuple(content[one:two] for one, two in pairwise(ends))
    return Commands(disk, run, sequence, floor, commands)


def _decode_join(content: bytes) -> JoinEntry:
    if len(content) < _JOIN_HEADER.size:
        raise _malformed("is too short", len(content))
    _, version, length, zero, disk = _JOIN_HEADER.unpack_from(content)
    _check_version(version)
    name = content[_JOIN_HEADER.size :].decode("ascii", "replace")
    if zero or len(name) != length or not is_name(name):
        raise _malformed("has an invalid name", name[:200])
    return JoinEntry(name, disk)


def _decode_reset(content: bytes) -> ResetEntry:
    if not _RESET_HEADER.size <= len(content) <= _RESET_HEADER.size + COMMAND_BYTES_MAX:
        raise _malformed("has an invalid length for a reset", len(content))
    _, version, zeros, epoch = _RESET_HEADER.unpack_from(content)
    _check_version(version)
    if any(zeros):
        raise _malformed("has nonzero reserved bytes", zeros)
    return ResetEntry(epoch, content[_RESET_HEADER.size :])


def _check_version(version: int) -> None:
    if version != _VERSION:
        what = "unknown version of a Raft entry"
        raise UnknownVersion(what, got=version, expected=_VERSION, hint=NEWER_HINT)


def _malformed(what: str, got: object) -> FormatError:
    return FormatError(f"a Raft entry {what}", got=got)


# The largest entries: one command of the maximum size, or a full pack.
assert _PACK.size + 4 + COMMAND_BYTES_MAX <= ENTRY_BYTES_MAX
assert _PACK.size + 4 * PACK_COMMANDS_MAX + PACK_BYTES <= ENTRY_BYTES_MAX
