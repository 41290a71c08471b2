"""The data process of a node: session copies, the merged log, the servers that move them. All payload.

link        the connection to the control process
replica     the sequencer's state as this process follows it
sessions    the copies of sessions: what pushes may bring, what is durable, what is final
merger      carries out merge orders
peers       what the others have and this node lacks
scrubbing   reading again what lies on disk; mending: overwriting what is damaged; healing: both of them here
process     all of it together
"""
