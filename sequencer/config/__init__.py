"""Settings, exit statuses and startup phases of a node."""
