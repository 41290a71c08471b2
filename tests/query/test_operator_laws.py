"""Every operator, on an example: its output, without and with saves and crashes at every event."""

from __future__ import annotations

import pytest
from operator_examples import EXAMPLES, outcome
from operator_table import rows

from rt.testing.queries import check_laws, hot


@pytest.mark.parametrize("name", [row.name for row in rows()])
def test_operator_emits_same_output_with_saves_and_crashes_at_every_event(name: str) -> None:
    for query, marbles, expected in EXAMPLES[name]:
        assert outcome(check_laws(query, {"in": hot(marbles)}, until_s=20)) == expected
