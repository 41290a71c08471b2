"""The control process of a node: Raft, the replicated state, the leader's plans. It handles no payload.

process        wires everything: which module handles which event
state_machine  the state machine that Raft drives, and the recent write plans that its snapshot carries
leader_loop    runs `sequencer.leader` while this node leads
reporter       what this node's data process holds durably, reported to the leader
peer_messenger messages between nodes beside consensus
cluster_view   the status of all nodes, for the data process
"""
