"""Consensus: a replicated log of commands that keeps what it acknowledged.

`consensus` is what the sequencer asks for, and all that the rest of rt needs; `raft.Raft` provides it.
From the outside in:

    raft          a node on real disk, network and thread
    node          the loop's parts put together: proposals, joins, snapshots
    hardened      the protocol, on PySyncObj: read its laws first
      election, handover, following, followers (progress, install), disks, agreement   its decisions
      stock       PySyncObj's log, outbox and clock, on ours
    proposals, entries, state                                            commands on their way, applied once
    log (record, log_recovery, ...), snapshots, identity, opening        what is kept on disk
    transport (connection, admittance, dial), codec, messages            what is said to the others

No other module of rt knows PySyncObj.
"""
