"""The commands that a leader proposes. All modules but `leader` are pure."""
