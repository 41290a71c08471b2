"""Blocks of a merged log: a header, then consecutive batches of one session, copied verbatim.

    offset  bytes  field
         0      4  magic "RTK1"
         4      4  checksum: CRC-32C of bytes 8-95, seeded with (cluster id, X, Y, offset) of the block
         8      2  version
        10      2  kind: 1 batches, 2 declaration
        12      4  index in the instruction
        16      8  instruction number
        24      4  session id
        28      4  source X
        32      4  source Y
        36      4  messages to skip at the start (dedup)
        40      8  source offset
        48      8  bytes that follow the header
        56      8  first position: that of the first message that is not skipped
        64      8  message count after the skip
        72      8  sequencing time, ns since the Unix epoch
        80      4  checksum of the bytes that follow (declaration), 0 (batches have their own)
        84      4  chain start: the source segment's chain before these batches, 0 in a declaration
        88      4  chain end: the source segment's chain after these batches, 0 in a declaration
        92      4  0

The seed depends on the block's place, as with batches (`rt.log.format.checksum`): a valid block that is in
another cluster's log, in another segment or elsewhere in its own does not verify. The chains
(`rt.log.format.running_checksum`) prove that the batches followed each other in the source.

The position of message i of the block (counted with the skipped ones) is first position + i - skip. A
declaration has no messages. It names a session id before the id is first used in a segment, so that every
segment can be read alone:

         0     16  incarnation
        16      2  bytes of the session's name
        18      2  bytes of the dedup id, 0 if it is no dedup session
        20         the name, the dedup id (UTF-8), padded to 8

Every field comes from the merge instruction and the source bytes, none from the node that merges. In a
declaration skip, source X, Y, offset and chains are 0. A new kind of block, or a use of the zeros, needs a
new version of the segment: an older rt would treat such a block as a torn tail.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from msgspec import Struct

from rt.log.format.checksum import crc32c
from rt.log.format.constants import NUMBER_MAX, VERSION, Buffer, padded, padding
from rt.names import SESSION_NAME_BYTES_MAX, check_dedup_id, check_session_name

BLOCK_HEADER_BYTES: Final = 96
BLOCK_MAGIC: Final = int.from_bytes(b"RTK1", "little")

_HEADER = struct.Struct("<IIHHIQIIIIQQQQqIII4s")
_DECLARATION = struct.Struct("<16sHH")
_NOTHING = bytes(4)
DECLARATION_BYTES_MAX: Final = padded(_DECLARATION.size + 2 * SESSION_NAME_BYTES_MAX)


class BlockKind(IntEnum):
    BATCHES = 1
    DECLARATION = 2


_KINDS: Final = frozenset(BlockKind)


class BadBlock(ValueError):
    """The problem of a block as text. The caller adds the file and decides what it means."""


class BlockHeader(NamedTuple):
    """The fields of a block's 96-byte header, without magic and checksum."""

    version: int
    kind: int
    instruction_index: int
    instruction: int
    session_id: int
    source_run: int
    source_roll: int
    skip: int
    source_offset: int
    length_bytes: int
    first_position: int
    message_count: int
    sequenced_ns: int
    content_checksum: int = 0
    chain_start: int = 0
    chain_end: int = 0

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first_position + self.message_count


class Declaration(Struct, frozen=True):
    """The session of a session id, up to the end of the segment."""

    session: str
    incarnation: bytes
    dedup_id: str | None = None

    def __post_init__(self) -> None:
        check_session_name(self.session)
        if self.dedup_id is not None:
            check_dedup_id(self.dedup_id)
        if len(self.incarnation) != 16:
            raise ValueError(f"incarnation must be 16 bytes, not {len(self.incarnation)}")


def encode_block_header(header: BlockHeader, seed: int) -> bytes:
    """`seed` is the `batch_seed` of the block's place in the merged segment."""
    unsealed = _HEADER.pack(BLOCK_MAGIC, 0, *header, _NOTHING)
    return unsealed[:4] + crc32c(unsealed[8:], seed).to_bytes(4, "little") + unsealed[8:]


def chain_start_of(head: Buffer) -> int:
    """The chain start in an encoded block header, which is not verified."""
    return BlockHeader(*_HEADER.unpack_from(head)[2:-1]).chain_start


def decode_block_header(data: Buffer, start: int, seed: int) -> BlockHeader:
    """Read the header at `start`. Raises `BadBlock` if the checksum, the version or a bound is wrong.

    `seed` is as in `encode_block_header`. Afterwards the length of a declaration safely bounds a read.
    """
    magic, checksum, *fields, nothing = _HEADER.unpack_from(data, start)
    if magic != BLOCK_MAGIC:
        raise BadBlock(f"no block starts here: magic {magic:#010x}")
    if checksum != crc32c(memoryview(data)[start + 8 : start + BLOCK_HEADER_BYTES], seed):
        raise BadBlock("block header fails its checksum")
    header = BlockHeader(*fields)
    if header.version != VERSION or header.kind not in _KINDS or nothing != _NOTHING:
        raise BadBlock(f"unknown to this rt: block of version {header.version}, kind {header.kind}")
    if header.length_bytes % 8 or max(header.length_bytes, header.end, header.source_offset) >= NUMBER_MAX:
        raise BadBlock(f"block header out of range: {header.length_bytes} bytes, end {header.end}")
    if header.kind == BlockKind.DECLARATION and (
        header.length_bytes > DECLARATION_BYTES_MAX or header.message_count
    ):
        raise BadBlock(f"declaration of {header.length_bytes} bytes and {header.message_count} messages")
    if header.kind == BlockKind.DECLARATION and (header.chain_start or header.chain_end):
        raise BadBlock(f"declaration with chains {header.chain_start:#x} and {header.chain_end:#x}")
    return header


def encode_declaration(header: BlockHeader, declaration: Declaration, seed: int) -> bytes:
    """A declaration block. `header` has its instruction, session id, position and time. `seed` is as in
    `encode_block_header`.
    """
    name, dedup = declaration.session.encode(), (declaration.dedup_id or "").encode()
    content = _DECLARATION.pack(declaration.incarnation, len(name), len(dedup)) + name + dedup
    content += padding(len(content))
    whole = header._replace(
        kind=BlockKind.DECLARATION,
        source_run=0,
        source_roll=0,
        skip=0,
        source_offset=0,
        length_bytes=len(content),
        message_count=0,
        content_checksum=crc32c(content),
        chain_start=0,
        chain_end=0,
    )
    return encode_block_header(whole, seed) + content


def decode_declaration(header: BlockHeader, content: Buffer) -> Declaration:
    """Decode the bytes after a declaration's header. Raises `BadBlock` if they do not verify."""
    if header.kind != BlockKind.DECLARATION or len(content) != header.length_bytes:
        raise BadBlock(f"no declaration: kind {header.kind}, {len(content)} of {header.length_bytes} bytes")
    if len(content) < _DECLARATION.size or crc32c(content) != header.content_checksum:
        raise BadBlock("declaration fails its checksum")
    incarnation, name_bytes, dedup_bytes = _DECLARATION.unpack_from(content)
    text = bytes(content[_DECLARATION.size :])
    if padded(_DECLARATION.size + name_bytes + dedup_bytes) != len(content):
        raise BadBlock(f"declaration of the wrong length for names of {name_bytes} + {dedup_bytes} bytes")
    try:
        name, dedup = text[:name_bytes].decode(), text[name_bytes : name_bytes + dedup_bytes].decode()
        return Declaration(name, incarnation, dedup or None)
    except ValueError as error:
        raise BadBlock(f"declaration names no session: {error}") from error
