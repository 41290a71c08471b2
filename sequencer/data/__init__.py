"""The data process of a node: its servers, and the wiring of session replicas, merged log and state."""
