"""Leases, and the tables that their owners keep in the replicated state."""
