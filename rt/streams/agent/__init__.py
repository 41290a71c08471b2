"""Serving one queue: its cache, its consumers and their subscriptions."""
