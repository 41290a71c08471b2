"""`rt demo`: several publishers, one of them killed on the way, and a check of every byte."""
