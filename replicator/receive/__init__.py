"""From messages on the wire to a directory."""
