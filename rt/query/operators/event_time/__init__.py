"""Operators that follow the times of the values: windows, joins, order by time."""
