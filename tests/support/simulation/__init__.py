"""A simulated cluster of Raft nodes: one seed decides clock, network, disk and faults."""
