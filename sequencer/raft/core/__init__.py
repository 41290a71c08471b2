"""The Raft protocol; the only code that knows PySyncObj."""
