"""The stores of a host for the subscriptions of its queues, if these are not kept in the clusters
(`cluster_stores`).
"""

from __future__ import annotations

import os

from rt.errors import StorageError
from rt.objects import MemoryStore, Store
from rt.objects.fenced_files import open_fenced
from rt.option_checks import check_path
from rt.streams.balancer.balancer import Fence
from rt.streams.core.stream_id import QueueId
from rt.streams.subscriptions.subscription_store import Stores


def memory_stores() -> Stores:
    """Subscription stores in memory: a new process starts without subscriptions.

    The next owner of a queue finds the data of the one before, as long as both use the same returned object.
    """
    stores: dict[QueueId, MemoryStore] = {}

    def opened(queue: QueueId, _: Fence) -> Store:
        # A copy: an earlier owner that still has its store changes nothing in this one, so no fence is
        # needed.
        previous = stores.get(queue)
        stores[queue] = MemoryStore(None if previous is None else previous.content())
        return stores[queue]

    return opened


def directory_stores(directory: str | os.PathLike[str]) -> Stores:
    """Subscription stores in files in `directory`, one for each queue. Hosts on one machine may share it.

    A new owner never waits for the one before, which gets `rt.Fenced` at its next commit
    (`rt.objects.fenced_files`). Raises `rt.StorageError` if there is no such directory.
    """
    root = os.path.abspath(check_path(directory, name="directory"))
    if not os.path.isdir(root):
        raise StorageError(
            "the directory of the subscription stores does not exist",
            where=root,
            hint="Correct the path, or create the directory.",
        )
    return lambda queue, fence: open_fenced(root, queue.name, fence)
