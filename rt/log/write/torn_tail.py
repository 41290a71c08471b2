"""Decide what the end of an active segment means after a crash.

Invariants:
- Bytes below the durable end were synced: a bad one there is corruption, and is never cut.
- The torn tail starts at the first incomplete or bad frame at or after the durable end, whatever follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rt.errors import Corrupt


@dataclass(frozen=True, slots=True)
class TornTail:
    """Cut the segment at `end`, which removes `torn_bytes`. `next` is the next number or position."""

    end: int
    next: int
    torn_bytes: int


def judge_tail(
    *,
    path: str,
    verified_end: int,
    next_number: int,
    size_bytes: int,
    durable_end: int,
    problem: str | None,
) -> TornTail:
    """Decide what to do with a segment whose frames verify up to `verified_end`.

    `size_bytes` is the file's size, `durable_end` what its writer last recorded as synced (0: nothing),
    `problem` the scanner's reason to stop. Raises `rt.Corrupt` if synced bytes fail or are missing.
    """
    assert verified_end <= size_bytes, (verified_end, size_bytes)
    if verified_end < durable_end:
        raise Corrupt(
            problem or "synced bytes are missing",
            path=path,
            offset=verified_end,
            got=f"{size_bytes} bytes",
            expected=f"whole frames up to {durable_end}",
            hint="This is no torn tail: restore the file, or start a new session directory.",
        )
    return TornTail(verified_end, next_number, size_bytes - verified_end)
