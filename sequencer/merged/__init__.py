"""The merged log on a node: merge, catch up, scrub, repair."""
