"""`rt demo`: nodes, publishers of real data, a subscriber, a killed leader, a check of every byte."""
