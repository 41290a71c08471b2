"""The ten kinds of objects."""
