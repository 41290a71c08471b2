"""What operators request of the cluster: requests that wait, resets, changes of the members. Pure."""
