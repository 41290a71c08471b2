"""The sequencer: it defines the order of the messages of all sessions in the merged log."""
