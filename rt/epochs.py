"""The name of an epoch of a cluster, in 63 bits, and which epoch goes before which. Pure.

Raft's log begins anew with each epoch. A reset that a majority commits leads from one to the next. An
operator who forces one where no majority is left makes the first epoch of the next *generation*, and of a
*line* that is drawn by lot: nothing keeps operators from doing so on two nodes that do not hear of each
other. The law: two lines are never one epoch, whatever their numbers.

    generation, 8 bits | line, 39 bits, 0 if none was forced | resets since, 16 bits

The number of an epoch, for users and for the X of merged segments, is generation * 65,536 + resets.
"""

from __future__ import annotations

from typing import Final

LINE_BITS: Final = 39
GENERATIONS_MAX: Final = 255
EPOCH_END: Final = 1 << 63
_RESETS_BITS: Final = 16
_RESETS_END: Final = 1 << _RESETS_BITS
_GENERATION_SHIFT: Final = _RESETS_BITS + LINE_BITS


def generation_of(epoch: int) -> int:
    """How often the cluster was forced."""
    return epoch >> _GENERATION_SHIFT


def number_of(epoch: int) -> int:
    """What users see of an epoch. Two that came of different forces may have the same number."""
    return generation_of(epoch) * _RESETS_END + epoch % _RESETS_END


def name_of(epoch: int) -> str:
    """An epoch in words: its number, and behind a force its line."""
    line = epoch >> _RESETS_BITS & (1 << LINE_BITS) - 1
    return f"{number_of(epoch)}-{line:010x}" if line else str(number_of(epoch))


def epoch_of(number: int, line: int) -> int:
    """The epoch with that number, in a line."""
    assert 0 <= line < 1 << LINE_BITS, line
    return number // _RESETS_END << _GENERATION_SHIFT | line << _RESETS_BITS | number % _RESETS_END


def may_be_reset(epoch: int) -> bool:
    """Whether the line has another epoch to come."""
    return epoch % _RESETS_END < _RESETS_END - 1


def forced_number(number: int) -> int:
    """The number of the epoch that comes of another one by force."""
    return (number // _RESETS_END + 1) * _RESETS_END


def is_succeeded(own: int, other: int) -> bool:
    """Whether epoch `other` came of `own` by resets alone."""
    return other > own and line_of(other) == line_of(own)


def is_outranked(own: int, other: int) -> bool:
    """Whether `other` came of a later force than `own`."""
    return generation_of(other) > generation_of(own)


def is_later(own: int, other: int) -> bool:
    """Whether a disk that is in `own` may go on in `other`."""
    return is_succeeded(own, other) or is_outranked(own, other)


def is_rival(own: int, other: int) -> bool:
    """Whether the two came of different forces, of which neither is the later one."""
    return generation_of(own) == generation_of(other) and line_of(own) != line_of(other)


def line_of(epoch: int) -> int:
    """What all epochs share that came of one force by resets alone, and no others have."""
    return epoch >> _RESETS_BITS
