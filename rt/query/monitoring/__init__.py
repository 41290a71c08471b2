"""Reports of an engine about its queries: dead letters, status, metrics, and the server for them."""
