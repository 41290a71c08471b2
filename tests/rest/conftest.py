"""What tests of the REST server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sequencer.rest.http import listener


@pytest.fixture(scope="package", autouse=True)
def patient_handshakes() -> Iterator[None]:
    """Allow long handshakes, so that a stalled machine ends no connection of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "HANDSHAKE_S", 120.0)
        yield
