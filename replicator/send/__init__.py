"""From a directory to messages on the wire."""
