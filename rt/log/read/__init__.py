"""Follow a log, seek in it, read ranges of it."""
