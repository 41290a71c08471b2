"""The lock that keeps forks away from what a forked child must not keep, until it is known here.

Hold it from the creation of such a descriptor until it is where the handlers of forks look.
"""

from __future__ import annotations

import os
import threading
from typing import Final

no_fork: Final = threading.RLock()
"""A fork waits for it. Hold it shortly, and take no other lock meanwhile."""

os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
