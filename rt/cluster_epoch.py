"""The id of a cluster epoch, in 63 bits, and the order of epochs. Pure.

Raft's log starts again with each epoch. A reset that a majority commits leads from one epoch to the next. If
an operator forces a reset without a majority, the cluster enters the first epoch of the next *generation*, in
a *line* that is drawn at random, because operators may force one on two nodes that cannot reach each other.

    generation, 8 bits | line, 39 bits, 0 if no reset was forced | resets since, 16 bits

The number of an epoch, for users and for the X of merged segments, is generation * 65,536 + resets.

Invariants:
- Epochs of two lines are never equal, whatever their numbers.
"""

from __future__ import annotations

from typing import Final

LINE_BITS: Final = 39
GENERATIONS_MAX: Final = 255
EPOCH_END: Final = 1 << 63
_RESETS_BITS: Final = 16
_RESETS_END: Final = 1 << _RESETS_BITS
EPOCH_NUMBER_END: Final = (GENERATIONS_MAX + 1) * _RESETS_END
_GENERATION_SHIFT: Final = _RESETS_BITS + LINE_BITS


def generation_of(epoch: int) -> int:
    """How often a reset was forced."""
    return epoch >> _GENERATION_SHIFT


def number_of(epoch: int) -> int:
    """The number shown to users. Epochs of two different lines may have the same number."""
    return generation_of(epoch) * _RESETS_END + epoch % _RESETS_END


def generation_of_number(number: int) -> int:
    """How often a reset had been forced when the epoch with this number, or a run of a merged log, began."""
    return number // _RESETS_END


def name_of(epoch: int) -> str:
    """An epoch as text: its number, then its line if a reset was forced."""
    line = epoch >> _RESETS_BITS & (1 << LINE_BITS) - 1
    return f"{number_of(epoch)}-{line:010x}" if line else str(number_of(epoch))


def epoch_of(number: int, line: int) -> int:
    assert 0 <= line < 1 << LINE_BITS, line
    return generation_of_number(number) << _GENERATION_SHIFT | line << _RESETS_BITS | number % _RESETS_END


def may_be_reset(epoch: int) -> bool:
    """Whether the epoch number can still grow in this line."""
    return epoch % _RESETS_END < _RESETS_END - 1


def forced_number(number: int) -> int:
    """The number of the epoch that a forced reset starts after epoch number `number`."""
    return (generation_of_number(number) + 1) * _RESETS_END


def is_succeeded(own: int, other: int) -> bool:
    """Whether epoch `other` follows `own` by resets that were not forced."""
    return other > own and line_of(other) == line_of(own)


def is_outranked(own: int, other: int) -> bool:
    """Whether `other` follows from a later forced reset than `own`."""
    return generation_of(other) > generation_of(own)


def is_later(own: int, other: int) -> bool:
    """Whether a disk in epoch `own` may continue in `other`."""
    return is_succeeded(own, other) or is_outranked(own, other)


def is_rival(own: int, other: int) -> bool:
    """Whether the two come from different forced resets of the same generation."""
    return generation_of(own) == generation_of(other) and line_of(own) != line_of(other)


def line_of(epoch: int) -> int:
    """Generation and line: equal for epochs that differ only by resets that were not forced."""
    return epoch >> _RESETS_BITS
