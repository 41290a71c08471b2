"""The Unix socket between the control and the data process of a node."""
