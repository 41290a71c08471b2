"""From bytes to verified batches and columns."""
