"""What a leader proposes. Pure but for `leader`."""
