"""Session push: client and server."""
