"""The TLS mesh between the nodes, and its codec."""
