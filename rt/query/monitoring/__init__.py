"""What an engine tells about its queries: dead letters, status, metrics, and where these are served."""
