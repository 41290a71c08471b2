"""A position in the log, as the checkpoint of a stream stores it: {"position": N, "epoch": E, "first": F}.

All messages before position N were read. F is the position at which the query started. Position N was right
in epoch E of the cluster (`rt.cluster_epoch`); E is 0 if the epoch is not known.

Spark compares the text of offsets, so equal offsets always have the same text.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

from msgspec import Struct

from rt.cluster_epoch import EPOCH_END
from rt.log.format.constants import NUMBER_MAX
from rt.spark.options import refused

_ENDS: Final = {"position": NUMBER_MAX + 1, "epoch": EPOCH_END, "first": NUMBER_MAX + 1}


class Offset(Struct, frozen=True):
    position: int
    epoch: int
    first: int

    @property
    def is_first(self) -> bool:
        """Whether nothing was read yet."""
        return self.position == self.first

    def to_json(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch, "first": self.first}


def parse_offset(name: str, value: object) -> Offset:
    """Parse an offset of a checkpoint, or its text. For any other value, `rt.InvalidOption` that mentions
    `name`.
    """
    found: Any = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            found = json.loads(value)
    is_whole = isinstance(found, dict) and found.keys() == _ENDS.keys()
    if is_whole and all(_is_below(each, _ENDS[key]) for key, each in found.items()):
        return Offset(**found)
    raise refused(name, value, f'{{"position": N, "epoch": N, "first": N}}, positions up to {NUMBER_MAX}')


def parse_start(name: str, value: object) -> Offset:
    """Parse a start that a user gives: a position N, {"position": N}, or an offset of another query."""
    position = value["position"] if isinstance(value, dict) and "position" in value else value
    if not _is_below(position, NUMBER_MAX + 1):
        raise refused(name, value, f'a position from 0 to {NUMBER_MAX}, as N or {{"position": N}}')
    given = {"epoch": 0, "first": position, **(value if isinstance(value, dict) else {"position": value})}
    return parse_offset(name, given)


def offset_text(position: int, epoch: int) -> str:
    """For `startingOffsets`: a position that was right in an epoch."""
    return json.dumps({"position": position, "epoch": epoch})


def _is_below(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
