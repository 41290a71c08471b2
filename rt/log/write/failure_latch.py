"""The state of a log writer after a failure: after a full disk it may be called again, else it is unusable.

After a failed sync, or an interrupted call, memory and disk may differ. Opening the directory again resolves
this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rt.errors import DiskFull, RtError, StorageError, StorageFailed
from rt.log.disk import OPEN_AGAIN, storage_error


class FailureLatch:
    """Remembers the first final failure of the writer of the directory `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._failure: StorageFailed | None = None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def guarded(self, name: str, doing: str) -> Iterator[None]:
        """After `rt.DiskFull` the call may be retried. Any other failure or interruption is final."""
        try:
            yield
        except OSError as error:
            raise self.failed(error, name, doing) from error
        except RtError:
            raise
        except BaseException as error:
            self._failure = StorageFailed(
                f"interrupted while {doing}",
                where=os.path.join(self._path, name),
                got=type(error).__name__,
                hint=f"{OPEN_AGAIN} Flushed messages are safe.",
            )
            raise

    def failed(self, error: OSError, name: str, doing: str, *, is_final: bool = False) -> StorageError:
        """Convert an error. All except a full disk (unless `is_final`) are remembered."""
        found = storage_error(error, os.path.join(self._path, name), doing)
        if isinstance(found, DiskFull) and not is_final:
            return found
        if not isinstance(found, StorageFailed):
            found = StorageFailed(found.what, where=found.where, got=found.got, hint=OPEN_AGAIN)
        self._failure = found
        return found
