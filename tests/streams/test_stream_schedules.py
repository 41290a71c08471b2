"""Runs with random faults, each decided by its seed: see `stream_world`."""

import pytest
import stream_world


@pytest.mark.parametrize("seed", range(24))
def test_any_faults_lose_and_reorder_nothing_and_everything_ends_idle(seed: int) -> None:
    world = stream_world.run(seed)
    assert world.acknowledged == len(world.tape)
