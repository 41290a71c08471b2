"""The data process of a node: session copies, the merged log, the servers that move them. All payload.

link        the connection to the control process; reports: what is told through it
replica     the sequencer's state as this process follows it
copies      the copies of sessions: what is stored, durable, final
intakes     what pushes may bring; logs: what pulls may read
opening     which copies are opened, and said to be final; fetching: what they lack, from peers
idle_copies closes the files of copies that nothing uses; closed_copies: removes those of closed sessions
consumed    what merging consumed of them, and what of it may be let go of
merger      carries out merge orders
merging     the merged log here: begun, synced, told of; catching_up: where the merger cannot go on by itself
inputs      what a merger is missing, and when it is fetched; fetched: what has come of it
peers       pulling from another node
scrubbing   reading again what lies on disk; mending: overwriting what is damaged; healing: both of them here
commanding  having what operators and subscribers want agreed on by the nodes
holding     holding data back for named subscribers, as they acknowledge
stepping    telling control where this process is on its way to keeping up
tasks       what runs beside the rest, and which failures end the process
process     all of it together: who hears of what
"""
