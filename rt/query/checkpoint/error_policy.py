"""What happens when a query raises an error for a value: the policies, and how they are stored.

    skip           the value goes to the dead letters, the query continues
    retry          the function is called again, up to 3 times; then as "skip"
    stop           the query ends with the error
    stop-engine    the value is not accepted, the error leaves the engine, which must be made again

Stored with the query: `{"then": …, "retries": …, "pause_s": …}`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self, get_args

from msgspec import Struct

from rt.errors import InvalidOption
from rt.objects import StateDamaged

Then = Literal["skip", "stop", "stop-engine"]
OnError = Literal["skip", "retry", "stop", "stop-engine"]

_THEN: Final = get_args(Then)
_RETRIES: Final = 3
_RETRIES_MAX: Final = 1000
_PAUSE_S_MAX: Final = 60.0


class ErrorPolicy(Struct, frozen=True):
    """`retries`: how often the function is called again. `pause_s`: seconds before each of these calls.

    The whole engine waits meanwhile, except for `map_async`. `then`: what happens if the last call failed.
    """

    then: Then = "skip"
    retries: int = 0
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        if self.then not in _THEN:
            raise InvalidOption(f"on_error must be one of {', '.join(_THEN)}, got {self.then!r}")
        if type(self.retries) is not int or not 0 <= self.retries <= _RETRIES_MAX:
            raise InvalidOption(f"retries must be 0 to {_RETRIES_MAX}, got {self.retries!r}")
        if not 0 <= self.pause_s <= _PAUSE_S_MAX:
            raise InvalidOption(f"pause_s must be 0 to {_PAUSE_S_MAX:g} seconds, got {self.pause_s!r}")

    @classmethod
    def of(cls, policy: OnError | ErrorPolicy) -> ErrorPolicy:
        """The policy with this name. `rt.InvalidOption` if there is none."""
        if isinstance(policy, ErrorPolicy):
            return policy
        if policy == "retry":
            return cls(retries=_RETRIES)
        return cls(policy)

    def row(self) -> dict[str, Any]:
        return {"then": self.then, "retries": self.retries, "pause_s": self.pause_s}

    @classmethod
    def from_row(cls, row: Any, where: str) -> Self | None:
        """`StateDamaged` if it is not a row."""
        if row is None:
            return None
        try:
            return cls(**row)
        except (TypeError, ValueError) as error:
            raise StateDamaged("not an error policy", where=where, got=repr(row)[:100]) from error

    def __str__(self) -> str:
        return f"retry {self.retries} times, then {self.then}" if self.retries else self.then
