"""Which host serves which queue, under leases."""
