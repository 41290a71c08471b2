"""What tests of rt and of programs on it need: disks that fail on demand, power cuts that can be replayed."""
