"""What a call to a disk fails with."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def code_of(call: Callable[[], object]) -> int | None:
    """The `errno` of the `OSError` that the call must raise."""
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno
