"""The promises that the demo checks: a verdict on each, from what the processes noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from rt.log.check.compare import Comparison
from sequencer.demo.tally import Total
from sequencer.localcluster.nodes import differences


class Verdict(Struct, frozen=True):
    """Whether a promise holds, and the evidence."""

    promise: str
    holds: bool
    reason: str


def check_messages(sent: Mapping[str, Total], got: Mapping[str, Total], fault: str) -> Iterator[Verdict]:
    """Compare the tallies of publishers and subscriber. `fault`: the first error of positions."""
    total, arrived = (sum(one.count for one in tallies.values()) for tallies in (sent, got))
    wrong = [name for name in sorted({*sent, *got}) if _count(sent, name) != _count(got, name)]
    reason = f"{arrived:,} of {total:,} messages"
    for name in wrong:
        reason += f"; of {name} {_count(got, name):,} of {_count(sent, name):,}"
    yield Verdict("nothing lost, nothing added", not wrong and total > 0, reason)

    faults = [f"{name}: {one.fault}" for name, one in sorted(got.items()) if one.fault]
    yield Verdict(
        "nothing duplicated or reordered",
        not faults,
        "; ".join(faults) or f"the numbers of {len(got)} sessions run from 0 without gap or repeat",
    )

    differ = [name for name in sorted(sent) if name in got and sent[name].digest != got[name].digest]
    yield Verdict(
        "every byte as it was sent",
        not differ and bool(sent),
        f"other messages: {', '.join(differ)}"
        if differ
        else f"{len(sent)} running hashes of what was sent and got agree",
    )
    yield Verdict("one order for all", not fault, fault or f"positions run from 0 to {arrived - 1:,}, dense")


def check_logs(comparison: Comparison, end: int, damage: Sequence[str]) -> Iterator[Verdict]:
    """Compare the bytes of the merged logs, including the subscriber's copy."""
    wrong = differences(comparison, end)
    sizes = {sum(segment.size_bytes for segment in log.kept) for log in comparison.logs}
    same = f"{len(comparison.logs)} merged logs, including the subscriber's copy: {max(sizes):,} bytes each"
    yield Verdict("merged logs byte-identical", not wrong, "; ".join(wrong) or same)
    yield Verdict(
        "every checksum holds", not damage, "; ".join(damage) or "all blocks and batches of a node's log"
    )


def _count(tallies: Mapping[str, Total], name: str) -> int:
    return tallies[name].count if name in tallies else 0
