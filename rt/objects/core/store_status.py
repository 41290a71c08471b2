"""What a check of a store found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a store holds."""

    path: str
    """The path of its file, or the address of its server without the password."""
    store_id: str
    commit: int
    """The number of the last commit."""
    rows: int
    categories: int
    is_in_use: bool
    """Whether a program has the store open."""
    is_complete: bool
    """Whether the file alone is enough: a backup that was not opened yet."""
    fence: int | None = None
    """The fencing token of the last owner. None: the store has none."""
