"""Consensus: a Raft-replicated log of commands that keeps every acknowledged command.

The rest of rt uses `raft.Raft`, and implements `model.api.StateMachine`. Layers, from the outside in:

    raft, node        a member on a real disk, network and thread; the loop
    proposals         commands in flight, each applied once
    lifecycle         bootstrap, epochs, snapshots, state transfer
    core              the protocol on PySyncObj: read the invariants of `core.core` first
    storage           log, snapshots and identity on disk
    transport         connections, authentication, message codec
    model             commands, messages, configuration, cluster state

No other package of rt imports PySyncObj.
"""
