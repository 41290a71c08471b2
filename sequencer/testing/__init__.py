"""What tests of the sequencer need: simulated clusters of Raft nodes under faults, and real ones.

`python -m sequencer.testing.simulate --help` runs seeds by hand: one seed decides everything.
"""
