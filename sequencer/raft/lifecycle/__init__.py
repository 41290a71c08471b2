"""Bootstrap, snapshot transfer, epochs and forced quorum."""
