"""Trees of categories, and which of them have an owner in this process."""

from __future__ import annotations

import threading
from typing import Final

from rt.objects.core.errors import OutOfTurn


def is_in_tree(category: str, root: str) -> bool:
    return category == root or category.startswith(f"{root}/")


class Claims:
    """The claimed trees of one store, and who saved which tree. Thread-safe. `where` is for errors."""

    def __init__(self, where: str) -> None:
        self._where: Final = where
        self._held: dict[str, TreeClaim] = {}
        self._saves: dict[str, object] = {}
        self._lock = threading.Lock()

    def last_save(self, root: str) -> object | None:
        return self._saves.get(root)

    def note_save(self, root: str) -> object:
        made = self._saves[root] = object()
        return made

    def claim(self, root: str) -> TreeClaim:
        """Claim a tree. `OutOfTurn` if it has categories in common with a claimed tree."""
        with self._lock:
            for held in self._held:
                if is_in_tree(held, root) or is_in_tree(root, held):
                    raise OutOfTurn(
                        "another owner uses these rows of the store",
                        where=self._where,
                        got=root,
                        expected=f"no tree that overlaps {held}",
                        hint="Unload the other owner first, or use another store.",
                    )
            made = self._held[root] = TreeClaim(self, root)
            return made

    def release(self, claim: TreeClaim) -> None:
        with self._lock:
            if self._held.get(claim.root) is claim:
                del self._held[claim.root]


class TreeClaim:
    """One claimed tree."""

    __slots__ = ("_claims", "root")

    def __init__(self, claims: Claims, root: str) -> None:
        self._claims: Final = claims
        self.root: Final = root

    def release(self) -> None:
        """End the claim. Idempotent."""
        self._claims.release(self)
