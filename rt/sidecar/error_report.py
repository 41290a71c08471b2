"""An error of a push or pull process as a message to its parent: see `rt.line_protocol`.

Pure. A line creates only errors of `rt.errors`.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from rt import errors
from rt.errors import Corrupt, RtError

_TEXTS: Final = ("what", "where", "got", "expected", "hint")
_TEXT_CHARACTERS_MAX: Final = 2000
_WITH_MORE: Final = (Corrupt, errors.Gap)
"""Classes with fields that are not texts."""


class ErrorReported(Struct, frozen=True, tag="failed"):
    """An error that a child process met, for its parent."""

    kind: str
    texts: dict[str, str]
    path: str = ""
    offset: int = 0

    @classmethod
    def of(cls, error: RtError) -> ErrorReported:
        """The report of an error. Long texts are cut."""
        said = {name: getattr(error, name) for name in _TEXTS}
        texts = {name: str(text)[:_TEXT_CHARACTERS_MAX] for name, text in said.items() if text is not None}
        place: tuple[Any, ...] = (error.path, error.offset) if isinstance(error, Corrupt) else ()
        return cls(type(error).__name__, texts, *place)

    @property
    def error(self) -> RtError:
        """The error; an `rt.RtError` if its class cannot be made of texts."""
        kind = getattr(errors, self.kind, None)
        texts: dict[str, Any] = {"what": ""} | {
            name: self.texts[name] for name in _TEXTS if name in self.texts
        }
        if kind is Corrupt:
            return Corrupt(**texts, path=self.path, offset=self.offset)
        has_texts_only = isinstance(kind, type) and issubclass(kind, RtError) and kind not in _WITH_MORE
        return kind(**texts) if has_texts_only and kind is not None else RtError(**texts)
