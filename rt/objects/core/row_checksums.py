"""The checksums of rows: CRC-32C of category, NUL, key, NUL, value. So a row in the wrong place fails too."""

from __future__ import annotations

from rt.log.format.checksum import crc32c


def category_checksum(category: str) -> int:
    """The checksum of a category, with which the checksums of its rows begin."""
    return crc32c(f"{category}\0".encode())


def row_checksum(seed: int, key: str, value: bytes) -> int:
    """The checksum of key and value, continued from the category's."""
    return crc32c(value, crc32c(f"{key}\0".encode(), seed))
