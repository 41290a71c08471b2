"""Which host is to serve which queue, by who is there. Pure.

Law: the answer follows from names alone, whatever order they come in, so hosts that see the same hosts answer
the same; and who joins or leaves moves few queues.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Final, TypeVar

from rt.streams.ids import RING_BITS, RING_SIZE
from rt.streams.mapping import RingRange

POINTS: Final = 64
"""Of each host on the ring: shares differ by an eighth or so then."""

R = TypeVar("R", str, int)


def ideal_fit(buckets: Collection[str], resources: Collection[R]) -> dict[str, list[R]]:
    """Runs of the resources, in order, for the buckets in order: the first ones have one more if need be."""
    ordered, rest = sorted(set(buckets)), sorted(set(resources))
    if not ordered:
        raise IndexError("no buckets")
    lower, more = divmod(len(rest), len(ordered))
    shares: dict[str, list[R]] = {}
    start = 0
    for index, bucket in enumerate(ordered):
        end = start + lower + (index < more)
        shares[bucket], start = rest[start:end], end
    return shares


def best_fit(
    buckets: Collection[str], resources: Collection[R], active: Collection[str] | None = None
) -> dict[str, list[R]]:
    """What each of the active buckets (default: all) has: its ideal share, and of those that are not active
    one after the other what each has least of.

    An active bucket never loses what is ideally its own. `IndexError` for an active bucket that is none.
    """
    ideal = ideal_fit(buckets, resources)
    present = sorted(ideal if active is None else set(active))
    if strange := [bucket for bucket in present if bucket not in ideal]:
        raise IndexError(f"not a bucket: {strange[0]}")
    shares = {bucket: list(ideal[bucket]) for bucket in present}
    if not shares:
        return {}
    left = sorted(one for bucket, share in ideal.items() if bucket not in shares for one in share)
    while left:
        by_load = sorted(shares, key=lambda bucket: len(shares[bucket]))
        for bucket, one in zip(by_load, left, strict=False):
            shares[bucket].append(one)
        left = left[len(by_load) :]
    return shares


def share_of(host: str, hosts: Collection[str], count: int) -> int:
    """How many of `count` queues a host is to have; the shares of all are `count`. 0 for one that is none."""
    ordered = sorted(set(hosts))
    if host not in ordered:
        return 0
    lower, more = divmod(count, len(ordered))
    return lower + (ordered.index(host) < more)


def ring_parts(host: str, hosts: Collection[str], *, points: int = POINTS) -> Sequence[RingRange]:
    """The parts of the ring that are the host's: each of its points ends one, which begins behind the last
    point before it, whoever's. The parts of all hosts are the ring, each place once.
    """
    places: dict[int, str] = {}
    for one in sorted(set(hosts), reverse=True):
        for point in range(points):
            digest = blake2b(f"{one}\n{point}".encode(), digest_size=RING_BITS // 8).digest()
            places[int.from_bytes(digest)] = one
    ordered = sorted(places)
    if not ordered:
        return ()
    return tuple(
        RingRange((before + 1) % RING_SIZE, place + 1)
        for before, place in pairwise([ordered[-1], *ordered])
        if places[place] == host
    )
