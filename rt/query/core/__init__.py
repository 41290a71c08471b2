"""Observables, operators and their runtime."""
