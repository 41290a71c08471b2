"""The Raft log, snapshots and identity on disk."""
