"""What the end of an active segment means after a crash.

Law: bytes below the durable end were synced, so a bad one there is damage and never cut. The first frame at
or beyond the durable end that is not whole or does not verify begins the torn tail, whatever follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rt.errors import Damaged


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a segment is cut: at `end`, taking away `torn_bytes`; the next number or position is `next`."""

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
) -> Tail:
    """Decide what to do with a segment whose frames verify up to `verified_end`.

    `size_bytes` is the file's, `durable_end` what its writer last recorded as synced (0: nothing), `problem`
    what the scanner said. `rt.Damaged` where synced bytes fail or are missing.
    """
    assert verified_end <= size_bytes, (verified_end, size_bytes)
    if verified_end < durable_end:
        raise Damaged(
            problem or "synced bytes are missing",
            path=path,
            offset=verified_end,
            got=f"{size_bytes} bytes",
            wanted=f"whole frames up to {durable_end}",
            hint="It was synced and is not a torn tail: restore the file, or start a new session directory.",
        )
    return Tail(verified_end, next_number, size_bytes - verified_end)
