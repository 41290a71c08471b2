"""The incarnations whose records were deleted: only a key of each is kept, so that they stay fenced.

Pure. The keys of all owners share one limit. Above it, the owner with the most keys loses its oldest ones. So
if a certificate opens and closes sessions indefinitely, it displaces its own keys, and no keys of other
owners.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Hashable, Iterable, Mapping
from itertools import islice
from operator import neg
from typing import Final, TypeVar

from msgspec import Struct, field

from rt.names import session_owner

FORGOTTEN_MAX: Final = 1 << 17
"""Maximum number of keys: 1.5 MiB of every snapshot."""
OWNER_BYTES: Final = 4
"""If the hashes of two owners are equal, the only effect is that the owners share the keys that each may
keep.
"""
KEY_BYTES: Final = OWNER_BYTES + 8

_Owner = TypeVar("_Owner", bound=Hashable)


class ForgottenSessions(Struct):
    """By hash of the owner, in the order of the first key: the keys of its incarnations, oldest first."""

    keys_of: dict[bytes, dict[bytes, None]] = field(default_factory=dict)

    @classmethod
    def decode(cls, data: bytes) -> ForgottenSessions:
        """Decode the keys; ValueError if they are truncated."""
        if len(data) % KEY_BYTES:
            raise ValueError(f"keys of forgotten incarnations in {len(data)} bytes")
        forgotten = cls()
        forgotten._add(data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))
        return forgotten

    def encode(self) -> bytes:
        return b"".join(key for keys in self.keys_of.values() for key in keys)

    def __len__(self) -> int:
        return sum(map(len, self.keys_of.values()))

    def __contains__(self, incarnation: tuple[str, bytes]) -> bool:
        """Whether the record of an incarnation, given with its session's name, was deleted."""
        key = forgotten_key(*incarnation)
        return key in self.keys_of.get(key[:OWNER_BYTES], ())

    def add(self, incarnations: Iterable[tuple[str, bytes]]) -> None:
        """Add incarnations in this order. Drops keys above the limit."""
        self._add(forgotten_key(*incarnation) for incarnation in incarnations)
        if (excess := len(self) - FORGOTTEN_MAX) <= 0:
            return
        sizes = {owner: len(keys) for owner, keys in self.keys_of.items()}
        for owner, count in taken_from_largest(sizes, excess).items():
            keys = self.keys_of[owner]
            for key in list(islice(keys, count)):
                del keys[key]
            if not keys:
                del self.keys_of[owner]

    def _add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.keys_of.setdefault(key[:OWNER_BYTES], {})[key] = None


def taken_from_largest(sizes: Mapping[_Owner, int], count: int) -> dict[_Owner, int]:
    """The number to take from each owner, if one is taken `count` times, each time from the owner that has
    the most.

    If owners have the same number, the owner that comes first in `sizes` loses first.
    """
    owners, ranked = list(sizes), zip(map(neg, sizes.values()), itertools.count(), strict=False)
    # The `count` largest owners are enough: no other owner can have the most before `count` were taken. The
    # list is sorted, so it is a heap.
    heap = heapq.nsmallest(count, ranked)
    taken = dict[_Owner, int]()
    for _ in range(min(count, sum(sizes.values()))):
        size, rank = heap[0]
        taken[owners[rank]] = taken.get(owners[rank], 0) + 1
        heapq.heapreplace(heap, (size + 1, rank))
    return taken


def forgotten_key(name: str, incarnation: bytes) -> bytes:
    """The key that is kept for an incarnation whose record was deleted: a hash of its owner, and a hash of
    its name and id.

    The id of a new incarnation is random, so its key equals one of `FORGOTTEN_MAX` other keys once in 10^14
    times.
    """
    owner = hashlib.blake2b(session_owner(name).encode(), digest_size=OWNER_BYTES).digest()
    rest = KEY_BYTES - OWNER_BYTES
    return owner + hashlib.blake2b(name.encode() + incarnation, digest_size=rest).digest()
