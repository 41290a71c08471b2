"""Where a host keeps the subscriptions of its queues, if their clusters do not."""

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
    """Subscription stores in memory. They last as long as this object; reopening one returns the same
    data.
    """
    stores: dict[QueueId, MemoryStore] = {}

    def opened(queue: QueueId, _: Fence) -> Store:
        before = stores.get(queue)
        stores[queue] = MemoryStore(None if before is None else before.content())
        return stores[queue]

    return opened


def directory_stores(directory: str | os.PathLike[str]) -> Stores:
    """One subscription store file per queue in `directory`, which hosts on one machine may share.

    A new owner waits for no other: see `rt.objects.fenced_files`.

    Raises `rt.StorageError` if there is no such directory.
    """
    root = os.path.abspath(check_path(directory, name="directory"))
    if not os.path.isdir(root):
        raise StorageError(
            "the directory of the subscription stores does not exist",
            where=root,
            hint="Correct the path, or create the directory.",
        )
    return lambda queue, fence: open_fenced(root, queue.name, fence)
