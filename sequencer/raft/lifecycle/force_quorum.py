"""Whether an operator may have one node go on by itself, in an epoch that no majority decided.

Pure. The law: it is refused while a majority could elect a leader, and before there is one to go on with.
"""

from __future__ import annotations

from collections.abc import Collection

from rt.cluster_epoch import GENERATIONS_MAX, generation_of
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.epochs import NoMajority


def refusal(
    config: RaftConfig, epoch: int, new: Collection[str], voters: Collection[str], *, is_blank: bool
) -> NoMajority | None:
    """Why not; None if it may be.

    `new` are the connected members on disks that were wiped and do not count yet, `voters` those that are
    here and count in `epoch`.
    """
    if is_blank or 2 * (1 + len(new)) <= len(config.members):
        return _nobody_to_go_on_with(config, new)
    if 2 * len(voters) > len(config.members):
        return NoMajority(
            "an epoch cannot be forced while a majority could elect a leader",
            where=config.directory,
            got=", ".join(sorted(voters)),
            hint="Wait for the leader; where there is none for long, the nodes' logs say why.",
        )
    if generation_of(epoch) == GENERATIONS_MAX:
        return NoMajority(
            "the cluster was forced too often", where=config.directory, expected=f"{GENERATIONS_MAX} times"
        )
    return None


def is_ending(directory: str) -> NoMajority:
    """A reset has ended this epoch here; the node is about to go on in the next one."""
    return NoMajority(
        "a reset has just ended this epoch here", where=directory, hint="Ask again when it is done."
    )


def _nobody_to_go_on_with(config: RaftConfig, new: Collection[str]) -> NoMajority:
    missing = sorted(set(config.peers) - set(new))
    return NoMajority(
        "an epoch cannot be forced before a majority of the members could go on with it",
        got=f"this node, and with empty directories {', '.join(sorted(new)) or 'none'}",
        expected=f"{len(config.members) // 2} of the others, started with empty directories",
        hint=f"Start some of {', '.join(missing)} with empty Raft and data directories, then ask again.",
    )
