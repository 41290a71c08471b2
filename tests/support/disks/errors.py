"""The error code of a failed call to a disk."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def code_of(call: Callable[[], object]) -> int | None:
    """The `errno` of the `OSError` that the call must raise."""
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno
