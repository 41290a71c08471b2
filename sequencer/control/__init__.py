"""The control process of a node: Raft, the replicated state, the leader's plans. No payload ever comes here.

frames      messages over the Unix socket between the two processes of a node
machine     the state machine that Raft drives, and the tail of merge orders that a snapshot carries
holdings    what this node's data process holds durably, and the reports made of it; reporting: when they are
leading     the board, the speculation and the proposals of the node that leads; planning: while it does
archiving   what the leader has trimmed, and configured
telling     what nodes tell each other beside consensus
standing    what each node says of itself, and what the data process is told of all of them
link        the socket that the data process connects to
process     all of it together: who hears of what
"""
