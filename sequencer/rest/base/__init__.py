"""Requests, parameters, errors and counters of the REST interface."""
