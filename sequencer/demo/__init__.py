"""`rt demo`: nodes, publishers of real data, a subscriber, a killed leader, and a check of every byte."""
