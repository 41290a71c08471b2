"""Operators that subscribe to an observable for every value, window or group."""
