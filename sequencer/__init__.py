"""The sequencer: what order the messages of all sessions take in the merged log."""
