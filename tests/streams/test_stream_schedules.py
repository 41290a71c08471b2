"""Runs in which everything goes wrong that can, each decided by its seed: see `stream_world`."""

import pytest
import stream_world


@pytest.mark.parametrize("seed", range(24))
def test_whatever_goes_wrong_nothing_is_lost_or_out_of_order_and_all_comes_to_rest(seed: int) -> None:
    world = stream_world.run(seed)
    assert world.acknowledged == len(world.tape)
