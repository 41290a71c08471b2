"""The garbage collector of processes that run for long and answer quickly."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Collect once, and from then on leave alone what is there: imports make some 60,000 objects that stay.

    A full collection, which nothing else can run beside, takes a few ms then instead of some 70.
    """
    gc.collect()
    gc.freeze()
