"""Simulated runs with random faults, each determined by its seed: see `stream_world`."""

import pytest
import stream_world


@pytest.mark.parametrize("seed", range(24))
def test_random_faults_lose_or_reorder_no_events_and_all_are_acknowledged(seed: int) -> None:
    world = stream_world.run(seed)
    assert world.acknowledged == len(world.tape)
