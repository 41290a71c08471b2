"""Session replicas on a node: ingest, progress of merging, fetching from peers."""
