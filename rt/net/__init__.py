"""The wire: TLS material, identities and the connections between processes."""
