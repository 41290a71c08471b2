"""Append, sync, roll, trim and recover a log directory."""
