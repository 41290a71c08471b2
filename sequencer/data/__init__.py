"""The data process of a node: session copies, the merged log, the servers that move them. All payload.

link        the connection to the control process
replica     the sequencer's state as this process follows it
sessions    the copies of sessions: what pushes may bring, what is durable, what is final
merger      carries out merge orders
process     all of it together
"""
